"""Hostile input for everything that listens or reads: `mesh bench fuzz`."""
