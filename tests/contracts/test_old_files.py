"""Files that earlier versions wrote are read."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np

from mesh.serve.head_state import HeadStateFile
from stages.serving.block_store import BlockLabel, decode_block
from tests.contracts.documents import differences

FILES = Path(__file__).parent / "old_files"


def test_the_state_of_an_earlier_head(tmp_path: Path) -> None:
    path = Path(shutil.copy(FILES / "head_state.json", tmp_path))
    with HeadStateFile(path) as file:
        state = file.load()
    assert state is not None
    read = json.loads(json.dumps(dataclasses.asdict(state)))
    written = json.loads(path.read_bytes())
    lost = [line for line in differences(written, {"format": written["format"], **read}) if line[0] != "+"]
    assert lost == []
    (model,) = state.models
    assert (model.load_request.served_name, model.load_request.ctx_size) == ("tiny", 512)


def test_a_block_of_the_kv_cache() -> None:
    content = np.fromfile(FILES / "block.rows", np.uint8)
    block = decode_block(BlockLabel(b"i" * 32, b"n" * 32), content)
    assert (block.start, block.stop, block.tokens.tolist()) == (64, 67, [5, 6, 7])
    assert block.prefix_sha256 == b"p" * 32
    assert block.rows.tolist() == list(range(48))
    assert block.state.tolist() == list(range(8))
