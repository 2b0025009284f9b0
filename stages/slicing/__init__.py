"""Slicing of a GGUF into stage files, each an ordinary smaller GGUF that unmodified llama.cpp loads."""
