"""The grammars that a tail follows: each made ready once, and shared by the sessions that have it."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import ProtocolError
from stages.grammar.automaton import Automaton
from stages.grammar.graph import build_graph
from stages.grammar.left_recursion import refuse_left_recursion
from stages.grammar.parser import parse_gbnf
from stages.grammar.token_masks import TokenMasks
from stages.grammar.token_texts import TokenTexts
from stages.grammar.token_tree import TokenTree

if TYPE_CHECKING:
    from spanmesh_proto import windows_pb2 as wire

_MOST_KEPT: Final = 16


def make_automaton(text: str) -> Automaton:
    """A GBNF text, ready to run.

    Raises:
        InvalidRequest: If it is no grammar, has no rule `root`, is left-recursive, or is too large.
    """
    graph = build_graph(parse_gbnf(text))
    refuse_left_recursion(graph)
    return Automaton(graph)


class Grammars:
    """Those of one tail. `take` is for its event loop, all else for the thread that computes.

    Args:
        n_vocab: Token ids are below this.
    """

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._message: wire.Vocabulary | None = None
        self._tree: TokenTree | None = None
        self._told: wire.Vocabulary | None = None
        self._kept: OrderedDict[str, TokenMasks] = OrderedDict()

    def take(self, message: wire.Vocabulary) -> None:
        """The vocabulary, as the coordinator tells it."""
        self._message = message

    def masks(self, text: str) -> TokenMasks:
        """The grammar, and the vocabulary that was told last.

        Raises:
            InvalidRequest: If it is no grammar that works.
            ProtocolError: If there is no vocabulary, or it is not this model's.
        """
        tree = self._read()
        masks = self._kept.get(text)
        if masks is None or masks.automaton.is_half_full:
            masks = self._kept[text] = TokenMasks(make_automaton(text), tree)
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(text)
        return masks

    def _read(self) -> TokenTree:
        message = self._message
        if message is None:
            raise ProtocolError("a session has a grammar, but no vocabulary came before it")
        if self._tree is None or message is not self._told:
            if self._tree is None or message != self._told:
                self._tree = TokenTree.of(TokenTexts.from_wire(message, self._n_vocab))
                self._kept.clear()
            self._told = message
        return self._tree
