"""How many files of the product a streamed chat enters, counted by a profiler."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from mesh.coordinator.composition import plugs_of
from mesh.options.model import ModelOptions
from mesh.text.tokenizer import Tokenizer
from stages.runtime.stage_runtime import RuntimeOptions
from stages.slicing.model_facts import read_model_facts
from tests.support.api_harness import running_api
from tests.support.ring_api import CHAT
from tests.support.ring_harness import running_coordinator, running_stages

if TYPE_CHECKING:
    from types import FrameType

ROOT: Final = Path(__file__).parents[2]
PRODUCT: Final = tuple(f"{ROOT / folder}/" for folder in ("proto", "speculative", "stages", "mesh"))
# What loads once, and what starts with the first answer, is left out.
NUM_BEFORE: Final = 2
# What only some of them enter is done at times, whether there is a chat or not.
NUM_COUNTED: Final = 12
MOST_FILES: Final = 70
BODY: Final = {
    "messages": [{"role": "user", "content": "hi there"}],
    "max_tokens": 5,
    "stream": True,
    "temperature": 0,
}


@pytest.mark.model
async def test_a_streamed_chat_enters_few_files(smollm2_path: Path, tmp_path: Path) -> None:
    """API, coordinator, and three stages with the real model, in one process; each thread is traced."""
    entered: list[set[str]] = []

    def trace(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and entered:
            entered[-1].add(frame.f_code.co_filename)

    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        options = RuntimeOptions(num_slots=2, ctx_size=512)
        tokenizer = Tokenizer(smollm2_path)
        async with (
            running_stages(smollm2_path, (10, 20), options, tmp_path / "cache") as stages,
            running_coordinator(
                stages,
                context_length=512,
                num_slots=2,
                n_vocab=tokenizer.n_vocab,
                token_texts=tokenizer.texts,
                plugs=plugs_of(ModelOptions(), read_model_facts(smollm2_path)),
            ) as coordinator,
            running_api(coordinator, tokenizer) as api,
        ):
            for number in range(NUM_BEFORE + NUM_COUNTED):
                if number >= NUM_BEFORE:
                    entered.append(set())
                async with api.http.stream("POST", CHAT, json=BODY) as response:
                    lines = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines[:-1])
    files = sorted(
        path.removeprefix(f"{ROOT}/") for path in set.intersection(*entered) if path.startswith(PRODUCT)
    )
    assert len(files) <= MOST_FILES, "\n".join(files)
