"""Drafters of a served model: their files, and what is refused."""
