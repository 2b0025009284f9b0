"""One host's share of a model: cutting it, running it, serving it."""

import spanmesh_proto.grpc_tuning  # noqa: F401 - before anything imports grpc
