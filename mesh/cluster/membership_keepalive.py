"""How soon host and head notice that the other is cut off: gRPC's pings on the membership stream."""

from __future__ import annotations

from typing import Final

_PING_MS: Final = 2_000
_ANSWER_MS: Final = 2_000

# Both ends ask; whoever hears nothing ends the stream within 4 s. gRPC answers in threads of its own, so a
# process that is merely busy is not taken for one that is gone.
KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.keepalive_timeout_ms", _ANSWER_MS),
    # gRPC sends no more pings than this without data in between; 0 is as many as there are.
    ("grpc.http2.max_pings_without_data", 0),
)

# How often a host may ping the head without being taken for a nuisance.
SERVER_PINGS: Final = (
    ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS // 2),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _PING_MS // 2),
)
