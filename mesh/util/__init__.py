"""Helpers that know nothing of a mesh."""
