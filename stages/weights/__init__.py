"""Weights: recipes, hashes, store and transfer of stage files."""
