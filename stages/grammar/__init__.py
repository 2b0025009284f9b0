"""Grammars: GBNF to masks of the tokens that may come next."""
