"""Answers that keep to a grammar: GBNF in, and which tokens may come next out."""

from stages.grammar.grammars import Grammars
from stages.grammar.limits import MAX_GRAMMAR_BYTES
from stages.grammar.record import Constraint, GrammarRecord
from stages.grammar.token_masks import TokenMasks
from stages.grammar.token_texts import TokenTexts

__all__ = ["MAX_GRAMMAR_BYTES", "Constraint", "GrammarRecord", "Grammars", "TokenMasks", "TokenTexts"]
