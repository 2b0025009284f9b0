"""Memory and time of cutting, hashing and transferring weights."""
