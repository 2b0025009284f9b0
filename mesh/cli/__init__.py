"""Command line: a module for each command of `mesh`, and shared parts."""
