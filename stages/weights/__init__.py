"""Weights of stages: recipes, hashes, the store of stage files and their transfer."""
