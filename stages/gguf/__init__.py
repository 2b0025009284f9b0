"""GGUF files: header, reader and file access."""
