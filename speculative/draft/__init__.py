"""Drafting with a small model; the one part of speculation that computes."""
