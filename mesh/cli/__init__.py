"""Command `mesh`: a module per command, and what commands share."""
