"""Architectures: rules for what a stage of each needs besides its own layers."""
