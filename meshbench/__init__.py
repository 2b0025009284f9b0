"""Benchmarks that users run: `mesh bench serve`, `net`, `spec` and `stress`."""
