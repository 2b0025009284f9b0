"""Options of commands from a file and from the environment.

The first of these that says anything counts: the flag on the command line, the environment variable, the
file, the command's own default.
"""
