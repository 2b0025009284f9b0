"""Faults in a mesh while clients read: `mesh bench chaos`."""
