"""Structured output: JSON Schema as grammars that the tail enforces, so that an answer is always valid."""
