"""Load of many clients on a mesh of several hosts, with every answer checked."""
