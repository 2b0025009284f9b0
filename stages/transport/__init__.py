"""Transport between stages: channels, links and the codec of hidden states."""
