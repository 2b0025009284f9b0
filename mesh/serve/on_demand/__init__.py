"""Models on demand: loaded when a request names them, unloaded when they idle."""
