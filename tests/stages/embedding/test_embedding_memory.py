"""Memory of embedding models, as foretold."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.placement.embedding_host import EmbeddingSizes
from stages.embedding.model_file import limits_of, read_embedding_facts
from tests.support.tiny_embedders import CLS, MEAN, TinyEmbedder, tiny_chat_model_with_pooling

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
MIB = 2**20
SMALL = TinyEmbedder("bert", CLS, n_layers=6, n_embd=384, n_ff=1536, n_heads=12, n_vocab=30_000)
LONG = TinyEmbedder("nomic-bert", MEAN, n_layers=4, n_embd=768, n_ff=3072, n_heads=12, n_ctx=4096)
MODELS: dict[str, Callable[[Path], Path]] = {
    "small": SMALL.write,
    "long": LONG.write,
    "with a cache and logits": lambda path: tiny_chat_model_with_pooling(path, "qwen3"),
}


@pytest.mark.parametrize(
    ("name", "ctx_size"),
    [
        ("small", None),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (("small", 64), ("long", 4096), ("long", 512), ("with a cache and logits", None))
        ),
    ],
)
def test_a_model_takes_no_more_than_foretold_and_little_less(
    name: str, ctx_size: int | None, tmp_path: Path
) -> None:
    path = MODELS[name](tmp_path / "tiny.gguf")
    facts = read_embedding_facts(path)
    limits = limits_of(facts, ctx_size)
    job = {
        "path": str(path),
        "options": {"num_slots": limits.most_texts, "ctx_size": limits.longest, "num_threads": 1},
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.embedding_footprint"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    peak_bytes = int(done.stdout.split()[-1])
    foretold_bytes = EmbeddingSizes(facts, limits).memory.total_bytes
    print(f"{name} {ctx_size}: {peak_bytes / MIB:.0f} of {foretold_bytes / MIB:.0f} MiB")
    assert peak_bytes <= foretold_bytes <= peak_bytes + 300 * MIB
