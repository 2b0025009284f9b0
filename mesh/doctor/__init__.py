"""What may be wrong with a host or a mesh, and what to do about it."""
