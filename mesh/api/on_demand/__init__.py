"""Requests for models that are loaded on demand."""
