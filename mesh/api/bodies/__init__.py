"""Request bodies on their way in: bytes within a budget, large ones parsed by another process."""
