"""What recurrent layers keep, as we count it and as llama.cpp says that it allocates it."""

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest

from mesh.placement.memory_estimate import StageSizes, Workload
from stages.certification.certify import cut_stage
from stages.layers import LayerRange
from stages.runtime import llama
from stages.runtime.numerics import numerics_for
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.model_facts import read_model_facts
from tests.qualification.random_hybrid import HybridShape, write_random_hybrid
from tests.support.tiny_families import TINY_FAMILIES

N_EMBD, N_VOCAB = 256, 320
D_INNER, D_STATE, D_CONV, DT_RANK = 2 * N_EMBD, 64, 4, 16
NUM_SLOTS = 7
LAYERS = 5


def write_mamba(path: Path) -> Path:
    """A Mamba of five layers, random."""
    noise = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(D_CONV)
    writer.add_ssm_inner_size(D_INNER)
    writer.add_ssm_state_size(D_STATE)
    writer.add_ssm_time_step_rank(DT_RANK)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(N_VOCAB)
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (N_VOCAB, N_EMBD),
        "output_norm.weight": (N_EMBD,),
        "output.weight": (N_VOCAB, N_EMBD),
    }
    for layer in range(LAYERS):
        for kind, shape in {
            "attn_norm.weight": (N_EMBD,),
            "ssm_in.weight": (2 * D_INNER, N_EMBD),
            "ssm_conv1d.weight": (D_INNER, D_CONV),
            "ssm_conv1d.bias": (D_INNER,),
            "ssm_x.weight": (DT_RANK + 2 * D_STATE, D_INNER),
            "ssm_dt.weight": (D_INNER, DT_RANK),
            "ssm_dt.bias": (D_INNER,),
            "ssm_a": (D_INNER, D_STATE),
            "ssm_d": (D_INNER,),
            "ssm_out.weight": (N_EMBD, D_INNER),
        }.items():
            tensors[f"blk.{layer}.{kind}"] = shape
    for name, shape in tensors.items():
        writer.add_tensor(name, noise.normal(0.0, 0.02, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def said() -> Any:
    """What llama.cpp says of its buffers meanwhile."""
    lines: list[str] = []

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def note(_level: int, text: bytes, _data: Any) -> None:
        lines.append(text.decode(errors="replace"))

    llama.init_backend()
    llama_cpp.llama_log_set(note, None)
    yield lines
    llama_cpp.llama_log_set(llama._on_log, None)


def test_a_recurrent_model_s_state_is_counted_as_llama_cpp_allocates_it(
    tmp_path: Path, said: list[str]
) -> None:
    path = write_mamba(tmp_path / "mamba.gguf")
    facts = read_model_facts(path)
    width = (D_CONV - 1) * D_INNER + D_STATE * D_INNER
    assert facts.state_widths == (width,) * LAYERS
    assert facts.kv_widths == (0,) * LAYERS
    sizes = StageSizes(facts, Workload(256, NUM_SLOTS))
    counted_bytes = sizes.cache_bytes(sizes.whole)
    with closing(StageRuntime(path, RuntimeOptions(num_slots=NUM_SLOTS, ctx_size=256))):
        pass
    mib = [float(found[1]) for line in said if (found := re.search(r"RS buffer size = +([\d.]+) MiB", line))]
    assert counted_bytes == pytest.approx(sum(mib) * 2**20, abs=0.02 * 2**20)


@pytest.mark.parametrize("name", ["qwen3next", "granitehybrid"])
@pytest.mark.parametrize("layers", [LayerRange(0, 1), LayerRange(1, 3), LayerRange(2, 3), LayerRange(0, 4)])
def test_a_hybrid_stage_s_caches_are_counted_with_those_of_its_company(
    name: str, layers: LayerRange, tmp_path: Path, said: list[str]
) -> None:
    """Of a stage of recurrent layers alone, or of attention alone, as of one of both."""
    source, stage = TINY_FAMILIES[name].write(tmp_path / "model.gguf"), tmp_path / "stage.gguf"
    cut_stage(source, layers, stage)
    counted_bytes = StageSizes(read_model_facts(source), Workload(4096, NUM_SLOTS)).cache_bytes(layers)
    with closing(StageRuntime(stage, RuntimeOptions(num_slots=NUM_SLOTS, ctx_size=4096))):
        pass
    pattern = r"(?:KV|RS) buffer size = +([\d.]+) MiB"
    mib = [float(found[1]) for line in said if (found := re.search(pattern, line))]
    assert len(mib) == 2
    allocated_bytes = sum(mib) * 2**20
    if layers == LayerRange(0, 1):  # what lies between it and its company is not counted
        assert allocated_bytes >= counted_bytes - 0.01 * 2**20
        assert allocated_bytes < 1.1 * counted_bytes
    else:
        assert counted_bytes == pytest.approx(allocated_bytes, abs=0.02 * 2**20)


@pytest.mark.parametrize("has_shared_cache", [False, True])
@pytest.mark.parametrize("name", ["mamba2", "qwen3next"])
def test_sequences_of_different_lengths_keep_their_rows(
    name: str, *, has_shared_cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they share a cache, as they do on a GPU."""
    exact = replace(numerics_for(exact=True, num_threads=1), has_shared_cache=has_shared_cache)
    monkeypatch.setattr("stages.runtime.stage_runtime.numerics_for", lambda **_mode: exact)
    source, stage = TINY_FAMILIES[name].write(tmp_path / "model.gguf"), tmp_path / "stage.gguf"
    cut_stage(source, LayerRange(1, 2), stage)
    noise = np.random.default_rng(2)
    spans = [
        Span(slot, 0, [0] * rows, noise.normal(size=(rows, 64)).astype(np.float32))
        for slot, rows in enumerate((5, 1, 3, 3))
    ]
    options = RuntimeOptions(num_slots=len(spans), ctx_size=64, exact=True)
    with closing(StageRuntime(stage, options)) as runtime:
        together = runtime.decode(spans)
    with closing(StageRuntime(stage, options)) as runtime:
        alone = [rows for span in spans for rows in runtime.decode([span])]
    assert all(map(np.array_equal, together, alone))


def test_a_model_with_attention_alone_keeps_no_state(smollm2_path: Path) -> None:
    assert read_model_facts(smollm2_path).state_widths == ()


@pytest.mark.model
@pytest.mark.parametrize(("num_slots", "exact"), [(1, True), (2, True), (3, False), (7, True)])
def test_memory_is_reserved_for_as_many_rows_of_each_slot(
    tmp_path: Path, num_slots: int, *, exact: bool
) -> None:
    """Otherwise llama.cpp's graph of kimi-linear aborts as soon as it is loaded."""
    path = TINY_FAMILIES["falcon-h1"].write(tmp_path / "model.gguf")
    cut_stage(path, LayerRange(0, 1), tmp_path / "stage.gguf")
    options = RuntimeOptions(num_slots=num_slots, ctx_size=64, exact=exact)
    with closing(StageRuntime(tmp_path / "stage.gguf", options)) as runtime:
        reserved = llama_cpp.llama_n_ubatch(runtime._context)
        assert reserved % num_slots == 0
        assert runtime.max_rows <= reserved < runtime.max_rows + num_slots


@pytest.mark.model
def test_rows_do_not_depend_on_the_number_of_threads_in_exact_mode(tmp_path: Path) -> None:
    """A lone row over many cached positions would split its attention by threads, and cannot be padded."""
    path = tmp_path / "hybrid.gguf"
    shape = HybridShape(
        n_layers=4, n_embd=256, n_ff=512, n_vocab=512, n_heads=2, n_heads_kv=1, n_state_heads=4
    )
    write_random_hybrid(path, shape)
    tokens = np.random.default_rng(1).integers(512, size=600).tolist()
    found = []
    for num_threads, num_at_once in ((1, 1), (2, 1), (2, 8)):
        options = RuntimeOptions(ctx_size=1024, exact=True, num_threads=num_threads)
        with closing(StageRuntime(path, options)) as runtime:
            for start in range(0, 560, 56):
                runtime.decode([Span(0, start, tokens[start : start + 56])])
            rows = [
                runtime.decode(
                    [Span(0, start, tokens[start : start + num_at_once], num_outputs=num_at_once)]
                )[0]
                for start in range(560, 600, num_at_once)
            ]
        found.append(np.concatenate(rows))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


@pytest.mark.model
def test_checkpoints_take_no_more_memory_than_were_kept_at_once(tmp_path: Path) -> None:
    path = TINY_FAMILIES["falcon-h1"].write(tmp_path / "model.gguf")
    cut_stage(path, LayerRange(0, 1), tmp_path / "stage.gguf")
    options = RuntimeOptions(num_slots=2, ctx_size=128, num_checkpoints=4)
    with closing(StageRuntime(tmp_path / "stage.gguf", options)) as runtime:
        # Held, so that no other has the same place.
        made: dict[int, Any] = {}
        for round_number in range(12):
            slot = round_number % 2
            kept: tuple[int, ...] = ()
            for start in range(0, 64, 4):
                kept = (*kept, start)[-4:] if start else ()
                runtime.decode([Span(slot, start, [5] * 4, checkpoints=kept)])
                made |= {id(copy): copy for held in runtime.memory._states._copies for copy in held.values()}
            # Back, and over.
            runtime.decode([Span(slot, kept[0], [6] * 4)])
            runtime.memory.trim(slot, 0)
            assert runtime.memory.return_points(slot) == (0,)
        # One more while the oldest is still there.
        assert len(made) <= 5
        assert runtime.memory.num_checkpoint_bytes == 0
