"""The GPU that tests of this folder compute on."""

import pytest

from stages.runtime.devices import Device, layer_devices


@pytest.fixture(scope="session")
def gpu() -> Device:
    """The first GPU of llama.cpp; without one a test fails, as nobody asks for these tests by chance."""
    devices = layer_devices()
    if not devices:
        pytest.fail("llama.cpp finds no GPU here: run `make test-gpu`")
    return devices[0]


@pytest.fixture(scope="session")
def num_tokens(gpu: Device) -> int:
    """Tokens to compare: fewer on Mesa's software device, which takes up to a second for each."""
    return 24 if gpu.is_software else 64
