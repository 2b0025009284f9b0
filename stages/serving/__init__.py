"""Serving of one stage: actor, gRPC server, scheduler, worker and KV cache."""
