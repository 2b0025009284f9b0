"""Sampling and verification of windows at the tail."""
