"""Sampling: samplers and verification of windows at the tail."""
