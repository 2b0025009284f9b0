"""Devices that may compute in exact mode, by backend, with the reasons for those that may not.

Exact mode promises that a row does not depend on the rows that are computed with it. Backends choose their
kernels by the number of rows, so that is a matter of measurement:

    python -m tests.qualification.device_exactness
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Verdict:
    """Measurements of a backend."""

    is_exact: bool
    """Whether its rows do not depend on their batch."""
    reason: str
    """What was found, and on which device; a part of a sentence."""


UNKNOWN: Final = Verdict(
    is_exact=False,
    reason="whether its rows depend on their batch was not measured: `python -m "
    "tests.qualification.device_exactness` measures it",
)
VERDICTS: Final[dict[str, Verdict]] = {
    "Vulkan": Verdict(
        is_exact=False,
        reason="on Mesa's software device its rows depend on their batch; `python -m "
        "tests.qualification.device_exactness` measures a card",
    ),
}
"""Verdicts by backend, as llama.cpp's names of devices begin: `CUDA`, `MTL`, `Vulkan`."""


def backend_of(device: str) -> str:
    """The backend of a device, from llama.cpp's name of it: `Vulkan0` is of `Vulkan`."""
    return device.rstrip("0123456789")


def verdict_on(device: str) -> Verdict:
    """Measurements of a device's backend.

    Args:
        device: llama.cpp's name of it.
    """
    return VERDICTS.get(backend_of(device), UNKNOWN)


def exact_reasons(devices: Iterable[str]) -> str:
    """Reasons why these devices do not compute in exact mode, one for each backend."""
    reasons = {backend_of(device): verdict_on(device) for device in devices}
    return "; ".join(f"{name}: {verdict.reason}" for name, verdict in reasons.items() if not verdict.is_exact)
