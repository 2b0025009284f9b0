"""`mesh bench spec`: what speculation is worth, measured in the lab through the chat endpoint."""
