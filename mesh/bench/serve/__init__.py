"""`mesh bench serve`: load for one OpenAI server, and what its clients would have felt."""
