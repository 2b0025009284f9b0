"""Forecast of `mesh plan`: memory and speed of a model on hosts, with nothing loaded."""
