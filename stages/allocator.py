"""How the C library allocates in a process that holds a stage."""

from __future__ import annotations

from typing import Final

# glibc gives threads memory pools of their own, and what one of gRPC's threads freed in its pool is of no use
# to the others: a stage that was sent 100,000 hostile frames came to 162 to 178 MiB and still grew, with one
# pool it stayed at 117. Nothing that is in a hurry allocates. Other C libraries ignore it.
ALLOCATOR: Final = {"MALLOC_ARENA_MAX": "1"}
