"""How hosts become a mesh: join tokens, membership, and the Ray node on each host."""
