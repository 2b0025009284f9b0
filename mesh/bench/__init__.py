"""Measurements on the lab: ours against others, and against what the hardware allows."""
