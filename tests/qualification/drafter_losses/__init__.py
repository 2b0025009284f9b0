"""Effects of losses of stages on drafters that read hidden states, measured in the lab."""
