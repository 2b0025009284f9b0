"""Qualification of pictures: their speed, what others feel of them, losses, hostile ones."""
