"""Helpers without dependencies on the mesh."""
