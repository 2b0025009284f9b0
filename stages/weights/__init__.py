"""Bringing weights to where they compute: what a stage file is made of, and who has or sends it."""
