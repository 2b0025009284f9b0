"""Draft model: the part of speculation that computes."""
