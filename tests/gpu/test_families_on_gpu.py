"""Models of every kind of attention, cut at every layer on a GPU, split with the processor, and beside it."""

from pathlib import Path

import pytest

from stages.runtime.devices import Device
from tests.qualification.device_parity import measure
from tests.support.float_models import write_float

pytestmark = [pytest.mark.gpu, pytest.mark.model]
# Plain, with windows, tied; the others: experts, sinks, latent attention, recurrent layers alone, beside
# attention in a layer and between such layers, and stages whose files have blank layers.
FAMILIES = (
    *("llama", "qwen3", "gemma3", "granite"),
    *("qwen3moe", "gpt-oss", "phi3", "gemma4", "deepseek2", "glm4moe", "mamba2", "falcon-h1", "qwen3next"),
    *("nemotron_h", "granitehybrid", "llama4-short", "smallthinker"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_of_one_layer_each_say_what_the_whole_model_says(
    name: str, tmp_path: Path, gpu: Device, num_tokens: int
) -> None:
    model = tmp_path / f"{name}.gguf"
    write_float(name, model)
    found = measure(model, gpu, tmp_path, num_tokens=num_tokens)
    print(
        f"{name}, cut at {found.cuts}, on {gpu.description}: stages {found.stages}; half on the processor "
        f"{found.split}; processor {found.processor}"
    )
    assert len(found.cuts) >= 2
    assert found.is_within, found
