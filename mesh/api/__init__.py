"""OpenAI-compatible HTTP API in front of any `mesh.engine.Engine`."""
