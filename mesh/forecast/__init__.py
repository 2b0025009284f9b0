"""What a mesh would be like before there is one: who would hold what, and how fast it would answer."""
