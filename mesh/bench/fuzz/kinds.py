"""The kinds of hostile input, each by the function that feeds it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.bench.fuzz.options import FuzzOptions
    from mesh.bench.fuzz.report import FuzzReport

# Each is an option of `mesh bench fuzz` of the same name; imported only when it is asked for.
_KINDS: Final = {
    "http": "mesh.bench.fuzz.over_http:fuzz_http",
    "grpc": "mesh.bench.fuzz.over_grpc:fuzz_grpc",
    "gguf": "mesh.bench.fuzz.ggufs:fuzz_ggufs",
    "tokens": "mesh.bench.fuzz.tokens:fuzz_tokens",
}


def fuzz(kind: str, options: FuzzOptions) -> FuzzReport:
    """Feed one kind of hostile input.

    Args:
        kind: Such as `http`.
        options: What the user says.

    Raises:
        MeshError: If what is to be tested does not start.
    """
    module, _, name = _KINDS[kind].partition(":")
    function: Callable[[FuzzOptions], FuzzReport] = getattr(importlib.import_module(module), name)
    return function(options)
