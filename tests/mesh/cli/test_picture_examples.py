"""The examples with pictures, run against a mesh whose model reads colours."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from mesh.serve.pictures import ServedPictures
from tests.support.colour_words import NUM_ROWS, counting_encoder, png, write_colours
from tests.support.mesh_in_process import mesh_in_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.mesh_in_process import MeshInProcess

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

EXAMPLES = Path(__file__).parents[3] / "examples" / "pictures"
QUESTION = "Which color is it? Answer with one word."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    smollm2_path: Path, cut_stages: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[MeshInProcess]:
    projector = write_colours(tmp_path_factory.mktemp("colours") / "mmproj.gguf", smollm2_path)
    with counting_encoder(projector, smollm2_path) as encoder:
        async with mesh_in_process(smollm2_path, pictures=ServedPictures.of(encoder)) as served:
            yield served


async def output_of(*command: str) -> str:
    program = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"MESH_API_KEY": "any"},
    )
    output, errors = await asyncio.wait_for(program.communicate(), 120)
    assert program.returncode == 0, (output + errors).decode()
    return output.decode()


async def test_the_python_client_asks_about_a_picture(served: MeshInProcess, tmp_path: Path) -> None:
    picture = tmp_path / "square.png"
    picture.write_bytes(png(" red"))
    said = await output_of(
        sys.executable, str(EXAMPLES / "ask.py"), str(picture), QUESTION, f"{served.api.url}/v1"
    )
    answer, tokens = said.splitlines()
    assert answer.startswith("answer: ")
    assert "red" in answer.lower()
    assert tokens == f"tokens of the picture: {NUM_ROWS}"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_asks_about_a_picture(served: MeshInProcess, tmp_path: Path) -> None:
    picture = tmp_path / "square.png"
    picture.write_bytes(png(" green"))
    said = await output_of("sh", str(EXAMPLES / "ask.sh"), str(picture), QUESTION, f"{served.api.url}/v1")
    answer = json.loads(said)
    assert "green" in answer["choices"][0]["message"]["content"].lower()
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == NUM_ROWS
