"""`mesh bench chaos`: a mesh is harmed while clients read, and they may see no more than a pause."""
