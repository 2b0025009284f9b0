"""Stages: slicing of a model, and running and serving the layers of one host."""

import spanmesh_proto.grpc_tuning  # noqa: F401 - before anything imports grpc
import stages.openmp_tuning  # noqa: F401 - before anything imports llama_cpp
