"""Protocol for a day with a real card: random models, one card, stages against the whole model."""
