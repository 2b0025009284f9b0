"""What people touch: the `mesh` command, the cluster, the coordinator, the OpenAI API."""

import spanmesh_proto.grpc_tuning  # noqa: F401 - before anything imports grpc
