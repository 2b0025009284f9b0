"""Text of a model: tokenizer, chat templates and the parts of its messages."""
