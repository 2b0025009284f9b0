"""Responses API of OpenAI: /v1/responses."""
