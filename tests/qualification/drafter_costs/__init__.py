"""Costs of drafters that read hidden states, measured in the lab."""
