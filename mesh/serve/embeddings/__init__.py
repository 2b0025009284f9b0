"""Embedding models of a mesh: the checks of their files, their host, and its replacement when it is lost."""
