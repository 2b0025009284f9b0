"""Embeddings API: /v1/embeddings."""
