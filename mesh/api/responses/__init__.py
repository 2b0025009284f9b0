"""`/v1/responses`: OpenAI's second API for chats, the one that coding agents use."""
