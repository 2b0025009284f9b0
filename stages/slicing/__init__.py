"""Slicing: stage files from a GGUF, each an ordinary smaller GGUF that unmodified llama.cpp loads."""
