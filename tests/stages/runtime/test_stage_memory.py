"""Memory of stages: foretold, and refused where it is not there."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.draft.drafter import loadable_bytes, read_drafter
from mesh.draft.memory import draft_memory_bytes, feature_drafter_bytes
from mesh.placement.memory_estimate import StageSizes, Workload
from spanmesh_proto.errors import ClusterError, ModelDoesNotFit
from speculative.draft.context import DraftOptions
from stages.layers import LayerRange
from stages.runtime.process_memory import StageMemory, free_memory_bytes
from stages.runtime.stage_runtime import RuntimeOptions
from stages.serving.actor import StageActor, StageConfig
from stages.slicing.model_facts import read_model_facts
from stages.weights.fetch import FetchSource
from stages.weights.virtual_stages import StageCache
from tests.support.eagle3 import DRAFTER
from tests.support.tiny_models import TinyModel

MIB = 2**20


@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("model", "layers", "workload"),
    [
        ("smollm2_path", LayerRange(20, 30), Workload(4096, 4, "q8_0")),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (
                ("smollm2_path", LayerRange(0, 10), Workload(2048, 8)),
                ("smollm2_path", LayerRange(10, 20), Workload(8192, 2, is_exact=True)),
                ("smollm2_path", LayerRange(0, 30), Workload(8192, 8)),
                ("gemma3_path", LayerRange(0, 6), Workload(512, 1)),
                ("gemma3_path", LayerRange(6, 12), Workload(32768, 4)),
                ("gemma3_path", LayerRange(12, 18), Workload(8192, 4)),
                ("gemma3_path", LayerRange(0, 18), Workload(32768, 1, "q4_0")),
            )
        ),
    ],
    ids=str,
)
def test_a_stage_takes_no_more_than_foretold_and_little_less(
    model: str, layers: LayerRange, workload: Workload, request: pytest.FixtureRequest, stage_cache_dir: Path
) -> None:
    path: Path = request.getfixturevalue(model)
    job = {
        "path": str(StageCache(stage_cache_dir).cut(path, layers).path),
        "options": {
            "num_slots": workload.num_slots,
            "ctx_size": workload.ctx_size,
            "exact": workload.is_exact,
            "kv_type": workload.kv_type,
        },
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.stage_footprint"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    peak_bytes = int(done.stdout.split()[-1])
    foretold_bytes = StageSizes(read_model_facts(path), workload).memory(layers).total_bytes
    print(f"{model} {layers} {workload}: {peak_bytes / MIB:.0f} of {foretold_bytes / MIB:.0f} MiB")
    assert peak_bytes <= foretold_bytes <= peak_bytes + 300 * MIB


def actor_for(path: Path, cache_dir: Path, memory: StageMemory, beside_bytes: int = 0) -> StageActor:
    layers = LayerRange(0, 3)
    file = StageCache(cache_dir).cut(path, layers)
    return StageActor(
        StageConfig(
            stage_index=1,
            layers=layers,
            sha256=file.sha256,
            source=FetchSource("127.0.0.1:1", b"", ""),
            options=RuntimeOptions(ctx_size=64),
            host="studio",
            memory=memory,
            beside_bytes=beside_bytes,
            mesh_id="mesh",
            mesh_key="key",
            cache_dir=str(cache_dir),
        )
    )


async def test_a_stage_is_refused_before_it_takes_more_than_is_free(tmp_path: Path) -> None:
    path = TinyModel("llama").write(tmp_path / "tiny.gguf")
    small = StageMemory(MIB, MIB, MIB, 192 * MIB)
    fitting = actor_for(path, tmp_path / "cache", small)
    await fitting.check_memory()
    await fitting.load()
    await fitting.stop()

    large = replace(small, cache_bytes=free_memory_bytes() * 2)
    too_large = actor_for(path, tmp_path / "cache", large)
    for work in (too_large.check_memory, too_large.load):
        with pytest.raises(ModelDoesNotFit) as refused:
            await work()
        message = refused.value.message
        assert message.startswith("stage 1 ([0, 3)) does not fit on studio now: it needs ")
        assert "1.0 MiB for weights" in message
        assert "; lower --ctx-size or --parallel, use --kv-type q8_0, " in message

    with pytest.raises(ModelDoesNotFit, match="for other stages there"):
        await actor_for(path, tmp_path / "cache", small, beside_bytes=large.cache_bytes).check_memory()


def test_a_draft_takes_its_file_its_cache_and_its_buffers(tmp_path: Path) -> None:
    path = TinyModel("llama", n_layers=4).write(tmp_path / "draft.gguf")
    short = draft_memory_bytes(path, DraftOptions(ctx_size=256, num_sessions=2))
    longer = draft_memory_bytes(path, DraftOptions(ctx_size=512, num_sessions=2))
    # 4 layers of 2 KV heads of 16 + 16, in f16; what else each position takes is less.
    per_position = 4 * 2 * (16 + 16) * 2
    assert path.stat().st_size < short
    assert per_position * 512 <= longer - short <= 2 * per_position * 512
    with pytest.raises(ClusterError, match="--draft-kv-type q8_0 packs 32 elements"):
        draft_memory_bytes(path, DraftOptions(kv_type="q8_0"))
    assert draft_memory_bytes(tmp_path / "absent.gguf", DraftOptions()) == 0


@pytest.mark.model
def test_a_drafter_that_reads_features_takes_them_and_one_layer(smollm2_path: Path) -> None:
    drafter = read_drafter(DRAFTER, read_model_facts(smollm2_path))
    options = DraftOptions(ctx_size=256, num_sessions=2)
    few = feature_drafter_bytes(drafter, smollm2_path, options, 16)
    assert few > loadable_bytes(drafter, smollm2_path) > DRAFTER.stat().st_size
    more = feature_drafter_bytes(drafter, smollm2_path, options, 512)
    assert more - few == 2 * (512 - 16) * 3 * 576 * 4
    longer = feature_drafter_bytes(drafter, smollm2_path, DraftOptions(ctx_size=512, num_sessions=2), 16)
    # 3 heads of keys and values in f16, llama.cpp's record of a position, and its part of a batch's mask.
    assert longer - few == 2 * 256 * (3 * (64 + 64) * 2 + 100 + 2 * 128)
