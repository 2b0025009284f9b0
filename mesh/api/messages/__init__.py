"""Messages API of Anthropic: /v1/messages."""
