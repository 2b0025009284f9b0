"""Weights that llama.cpp has copied do not lie in memory a second time."""

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages.runtime.process_memory import anonymous_bytes, give_back_mapped_pages
from tests.qualification.random_model import SHAPES, Shape, write_random_gguf

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 2**20
# Loads a model in fast mode and tells what of it is resident, in bytes: file pages, and all else that came.
LOAD = """
import json, sys
from pathlib import Path
from stages.runtime.process_memory import anonymous_bytes
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from tests.stages.runtime.test_mapped_pages import resident_bytes
path = Path(sys.argv[1])
options = RuntimeOptions(ctx_size=64)
before = anonymous_bytes()
runtime = StageRuntime(path, options)
found = {"file": resident_bytes(path), "anonymous": anonymous_bytes() - before}
logits = runtime.decode([Span(0, 0, [5, 6, 7], num_outputs=1)])[0]
found["computed"] = int(logits.argmax())
print(json.dumps(found))
"""


def resident_bytes(path: Path) -> int:
    """Of a file that this process has mapped."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=5)
        if not head[0].endswith(":"):
            is_ours = len(head) == 6 and head[5] == str(path.resolve())
        elif is_ours and head[0] == "Rss:":
            total += int(head[1]) * 1024
    return total


def test_pages_that_were_read_are_given_back_and_come_again(tmp_path: Path) -> None:
    path = tmp_path / "a file"
    content = os.urandom(4 * MIB)
    path.write_bytes(content)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:] == content
        assert resident_bytes(path) == len(content)
        assert give_back_mapped_pages(path) == len(content)
        assert resident_bytes(path) == 0
        assert mapped[:] == content


def test_pages_that_were_written_to_stay(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[:5] = b"hello"
        assert give_back_mapped_pages(path) == 0
        assert mapped[:5] == b"hello"
    assert give_back_mapped_pages(tmp_path / "absent") == 0


def test_memory_without_a_file_is_counted() -> None:
    before = anonymous_bytes()
    # Not `bytearray`: whether malloc gives a copy back that nobody needs any more is its own business.
    with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for _ in range(32):
            block.write(bytes(MIB))
        assert 31 * MIB < anonymous_bytes() - before < 40 * MIB


@pytest.mark.parametrize("weight_type", ["Q4_0", "Q8_0"])
def test_a_loaded_stage_holds_its_weights_once(weight_type: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shape = Shape(6, 1024, 2816, 16, 4, 512, is_tied=False)
    write_random_gguf(path, shape, "Q4_0" if weight_type == "Q4_0" else "Q8_0")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, check=True, timeout=100
    )
    found = json.loads(done.stdout)
    weight_bytes = path.stat().st_size
    print(f"{weight_type}: {weight_bytes / MIB:.0f} MiB of weights, {found}")
    assert weight_bytes > 30 * MIB
    # Repacked or not, with room for llama.cpp's buffers: twice would be twice.
    assert 0.9 * weight_bytes < found["file"] + found["anonymous"] < 1.3 * weight_bytes + 8 * MIB


def test_random_models_are_of_the_size_that_they_are_called() -> None:
    names = ("1.1b", "1.2b", "8b", "32b", "30b-a3b")
    billions = [round(SHAPES[name].num_parameters / 1e9, 2) for name in names]
    assert billions == [1.1, 1.24, 8.03, 32.76, 30.53]


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random_gguf(tmp_path / name, SHAPES["tiny"], "Q8_0", seed=seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c
    assert len(a) == len(c)
