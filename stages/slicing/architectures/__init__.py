"""Rules of architectures: what a stage of each needs besides its own layers."""
