"""Embedding models as the head uses them: batches of texts, the link to the host, and what the API serves."""
