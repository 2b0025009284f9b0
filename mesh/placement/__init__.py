"""Placement: which host holds which layers, in which order, over which wire types."""
