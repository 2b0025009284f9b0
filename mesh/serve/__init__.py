"""Head: placement, supervision and recovery of models, and what `mesh serve` starts."""
