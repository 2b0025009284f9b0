"""Drafters: the part of speculation that computes."""
