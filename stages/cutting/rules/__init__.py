"""Habits of llama.cpp that depend on where a layer stands in the model, and what makes a stage keep them."""
