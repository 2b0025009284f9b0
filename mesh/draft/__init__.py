"""Draft models: made from the target itself, checked against it, loaded."""
