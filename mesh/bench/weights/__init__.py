"""Bringing weights, measured and harmed: `python -m mesh.bench.weights`."""
