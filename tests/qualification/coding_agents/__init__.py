"""Coding agents against a mesh, without any other network."""
