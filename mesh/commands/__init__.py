"""One module for each command of `mesh`; each imports what it needs only when it runs."""
