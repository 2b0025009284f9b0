"""The GPU that tests of this folder compute on, and what Mesa's software device cannot compute."""

import pytest

from stages.runtime.devices import Device, layer_devices

# Mesa 22.3's software device faults while llama.cpp computes these, when it releases a buffer.
_CRASH_MESA = frozenset({"deepseek2", "llama4-short", "smallthinker"})


def is_software(gpu: Device) -> bool:
    """Whether the GPU is Mesa's software device."""
    return "llvmpipe" in gpu.description


def fewer_on_software(num_tokens: int, gpu: Device) -> int:
    """Tokens to compare: at most 24 on Mesa's software device, which takes up to a second for each."""
    return min(num_tokens, 24) if is_software(gpu) else num_tokens


def require_card_for(name: str, gpu: Device) -> None:
    """Skip the test of a model that Mesa's software device cannot compute, if there is no card."""
    if name in _CRASH_MESA and is_software(gpu):
        pytest.skip(f"needs a real card: Mesa's software device ends the process with {name}")


@pytest.fixture(scope="session")
def gpu() -> Device:
    """The first GPU of llama.cpp; without one a test fails, as nobody asks for these tests by chance."""
    devices = layer_devices()
    if not devices:
        pytest.fail("llama.cpp finds no GPU here: run `make test-gpu`")
    return devices[0]
