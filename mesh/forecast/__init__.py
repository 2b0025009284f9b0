"""Forecast of `mesh plan`: what a model would need and how fast it would be, with nothing loaded."""
