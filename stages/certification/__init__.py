"""Certification: bit equality of a model cut into stages with the whole model."""
