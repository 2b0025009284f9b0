"""Grammars: GBNF in, and the tokens that may come next out."""
