"""Packages: content of the wheels that `make wheels` builds, and their use in a clean environment."""
