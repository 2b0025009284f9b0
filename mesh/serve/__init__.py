"""What `mesh serve` does, step by step: Ray, membership, plan, cut, place, load, connect, answer."""
