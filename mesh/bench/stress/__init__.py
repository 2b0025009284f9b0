"""`mesh bench stress`: many users of a mesh over several hosts, every answer checked."""
