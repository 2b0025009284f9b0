"""One host's share of a model: cutting it, running it, serving it."""
