"""Options: each is declared once, for command line, files, variables, requests and saved states."""
