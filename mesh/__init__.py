"""What people touch: the `mesh` command, the cluster, the coordinator, the OpenAI API."""
