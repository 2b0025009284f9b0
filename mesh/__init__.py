"""The mesh: commands, cluster, placement, coordinator and OpenAI API."""

import spanmesh_proto.grpc_tuning  # noqa: F401 - before anything imports grpc
import stages.openmp_tuning  # noqa: F401 - before anything imports llama_cpp
