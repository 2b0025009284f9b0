"""gRPC tuning: environment variables that gRPC reads at its first import.

By default gRPC polls sockets in its own threads and wakes Python's event loop from them. With the two
`event_engine` experiments off, a message wakes one thread less, which saves about 80 µs per hop on a small
virtual machine. A variable that is already set keeps the user's value.
"""

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
