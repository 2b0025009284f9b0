"""`mesh bench fuzz`: hostile input for everything that listens or reads; one file for each kind."""
