"""The GPU that tests of this folder compute on, and what Mesa's software device cannot compute."""

import pytest

from stages.runtime.devices import Device, layer_devices


def is_software(gpu: Device) -> bool:
    """Whether the GPU is Mesa's software device."""
    return "llvmpipe" in gpu.description


def fewer_on_software(num_tokens: int, gpu: Device) -> int:
    """Tokens to compare: at most 24 on Mesa's software device, which takes up to a second for each."""
    return min(num_tokens, 24) if is_software(gpu) else num_tokens


def require_card(what: str, gpu: Device) -> None:
    """Skip a test that ends its process on Mesa's software device, as seen with Mesa 22.3.

    Args:
        what: What the test computes, for the reason.
        gpu: The device; on a card nothing is skipped.
    """
    if is_software(gpu):
        pytest.skip(f"needs a real card: Mesa's software device ends the process with {what}")


@pytest.fixture(scope="session")
def gpu() -> Device:
    """The first GPU of llama.cpp; without one a test fails, as nobody asks for these tests by chance."""
    devices = layer_devices()
    if not devices:
        pytest.fail("llama.cpp finds no GPU here: run `make test-gpu`")
    return devices[0]
