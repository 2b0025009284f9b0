"""Certification: whether a model cut into stages computes what the whole model does."""
