"""Meshes under test: on hosts of the lab, or running anywhere and reached by a URL."""
