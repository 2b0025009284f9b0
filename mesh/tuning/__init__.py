"""Recordings of a model's answers, and drafters tuned on them."""
