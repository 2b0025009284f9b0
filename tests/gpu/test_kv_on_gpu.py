"""KV caches on a GPU: every format, slots that are copied, and rows that pass to a processor and back."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from spanmesh_proto.errors import ModelDoesNotFit
from stages.layers import LayerRange
from stages.runtime.kv_state import KvRows
from stages.runtime.kv_types import KV_TYPES
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.weights.virtual_stages import StageCache
from tests.qualification.device_parity import PROCESSOR, compare, follow, random_prompt
from tests.support.float_models import write_float
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from stages.runtime.devices import Device

pytestmark = pytest.mark.gpu
NUM_TOKENS = 32
TEXT = [int(token) for token in np.random.default_rng(3).integers(3, 300, 40)]


def require_close(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    assert np.abs(ours - theirs).max() < 0.02 * np.abs(theirs).max()


def loaded(model: Path, options: RuntimeOptions) -> StageRuntime | str:
    """The model, or why it does not fit."""
    try:
        return StageRuntime(model, options)
    except ModelDoesNotFit as error:
        return error.message


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_every_format_says_what_it_says_on_the_processor(kv_type: str, tmp_path: Path, gpu: Device) -> None:
    """Within the bounds for devices; where a format costs more than these, within what it costs.

    A code of 4 or 5 bits that is rounded the other way is an error of a whole step.
    """
    model = TinyModel("llama", n_layers=3, head_size=32, is_float=True).write(tmp_path / "tiny.gguf")
    alone = RuntimeOptions(ctx_size=128, kv_type=kv_type, gpu_layers=())
    prompt = random_prompt(320)
    with closing(StageRuntime(model, alone)) as runtime:
        tokens, expected = follow([runtime], prompt, NUM_TOKENS)
    on_gpu = loaded(model, replace(alone, gpu_layers=((gpu.name, 3),)))
    if isinstance(on_gpu, str):
        # Quantised values need flash attention, which not every GPU has.
        assert KV_TYPES[kv_type].is_quantised
        assert "--kv-type f16" in on_gpu
        print(f"{gpu.description} has no {kv_type}: {on_gpu}")
        return
    with closing(on_gpu):
        _, logits = follow([on_gpu], prompt, NUM_TOKENS, tokens)
    found = compare(expected, logits)
    with closing(StageRuntime(model, replace(alone, kv_type="f32"))) as runtime:
        _, precise = follow([runtime], prompt, NUM_TOKENS, tokens)
    cost = compare(precise, expected)
    print(f"{kv_type} on {gpu.description}: {found}; what the format costs: {cost}")
    assert found.is_within(PROCESSOR) or (
        KV_TYPES[kv_type].is_quantised
        and found.mean_kl_nats <= cost.mean_kl_nats
        and found.num_agreed >= cost.num_agreed
    ), found


def test_a_slot_goes_on_from_the_first_rows_of_another(tmp_path: Path, gpu: Device) -> None:
    model = write_float("llama", tmp_path / "tiny.gguf")
    options = RuntimeOptions(num_slots=3, ctx_size=64, gpu_layers=((gpu.name, 6),))
    with closing(StageRuntime(model, options)) as runtime:
        runtime.decode([Span(0, 0, TEXT[:20])])
        runtime.memory.copy(0, 2, 12)
        (copied,) = runtime.decode([Span(2, 12, TEXT[12:20], num_outputs=8)])
        (plain,) = runtime.decode([Span(1, 0, TEXT[:20], num_outputs=8)])
        require_close(copied, plain)
        # What goes on in the copy leaves the other as it was.
        (ours,) = runtime.decode([Span(0, 20, TEXT[20:22], num_outputs=2)])
        (theirs,) = runtime.decode([Span(1, 20, TEXT[20:22], num_outputs=2)])
        require_close(ours, theirs)


STAGES = {
    "llama": LayerRange(0, 3),
    "gemma3": LayerRange(0, 3),
    "granite": LayerRange(0, 2),
    "qwen3moe": LayerRange(0, 2),
    "deepseek2": LayerRange(0, 2),
}


@pytest.mark.parametrize("name", STAGES)
def test_rows_pass_to_a_processor_and_back(name: str, tmp_path: Path, gpu: Device) -> None:
    """In pieces, into whatever slot, between caches of other layouts."""
    model = tmp_path / f"{name}.gguf"
    write_float(name, model)
    path = StageCache(tmp_path / "stages").cut(model, STAGES[name]).path
    on_gpu = RuntimeOptions(num_slots=3, ctx_size=64, gpu_layers=((gpu.name, len(STAGES[name])),))
    with (
        closing(StageRuntime(path, on_gpu)) as device,
        closing(StageRuntime(path, replace(on_gpu, gpu_layers=()))) as processor,
    ):
        device.decode([Span(0, 0, TEXT[:9])])
        device.decode([Span(1, 0, TEXT[:12])])
        for source, target, held, slot in ((device, processor, 1, 2), (processor, device, 2, 0)):
            rows = source.memory.kv_rows(held)
            target.memory.trim(slot, 0)
            for start, stop in ((0, 7), (7, 12)):
                target.memory.put_kv_rows(slot, KvRows.from_bytes(rows.cut(start, stop).to_bytes()))
            (expected,) = source.decode([Span(held, 12, TEXT[12:15])])
            (hidden,) = target.decode([Span(slot, 12, TEXT[12:15])])
            require_close(hidden, expected)
            source.memory.trim(held, 12)
            target.memory.trim(slot, 12)


@pytest.mark.parametrize("name", ["mamba2", "falcon-h1", "qwen3next"])
def test_recurrent_states_pass_to_a_processor_and_go_back_to_checkpoints(
    name: str, tmp_path: Path, gpu: Device
) -> None:
    model = write_float(name, tmp_path / f"{name}.gguf")
    path = StageCache(tmp_path / "stages").cut(model, LayerRange(0, 2)).path
    on_gpu = RuntimeOptions(num_slots=2, ctx_size=64, num_checkpoints=2, gpu_layers=((gpu.name, 2),))
    with (
        closing(StageRuntime(path, on_gpu)) as device,
        closing(StageRuntime(path, replace(on_gpu, gpu_layers=()))) as processor,
    ):
        device.decode([Span(1, 0, TEXT[:20])])
        device.decode([Span(1, 20, TEXT[20:25], checkpoints=(20,))])
        (further,) = device.decode([Span(1, 25, TEXT[25:30], checkpoints=(20, 25))])
        device.memory.trim(1, 25)
        (again,) = device.decode([Span(1, 25, TEXT[25:30])])
        require_close(again, further)
        found = device.memory.checkpoint(1, 29)
        assert found is not None
        num_positions, state = found
        assert num_positions == 25
        processor.memory.put_kv_rows(0, device.memory.kv_rows(1).cut(0, 25), state)
        (same,) = processor.decode([Span(0, 25, TEXT[25:30])])
        require_close(same, further)
