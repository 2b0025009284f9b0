"""Servers of the turns, as child processes that record what they are asked.

    python -m tests.qualification.coding_agents.recorded_server mesh RECORDING NUM_TOKENS [OPTIONS]...
    python -m tests.qualification.coding_agents.recorded_server scripted RECORDING PORT KEYS KIND MODEL

The first is `mesh serve` with two changes: exchanges are recorded, and free answers end after a number of
tokens. The second is the same HTTP app over a scripted model.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from mesh.api.api_keys import ApiKeys
from mesh.api.app import create_app
from mesh.api.backend import ApiContext, Backend, Backends
from mesh.api.http_server import serve_api
from mesh.cli import main as command_line
from mesh.serve import main as serving
from mesh.status import MeshStatus
from mesh.text.tokenizer import Tokenizer
from mesh.util.tasks import run_interruptible
from stages.gguf import model_name
from tests.qualification.coding_agents.engines import BoundedAnswers, ScriptedModel
from tests.qualification.coding_agents.model_kinds import MODEL_KINDS
from tests.qualification.coding_agents.recording import ExchangeRecorder

if TYPE_CHECKING:
    from fastapi import FastAPI

    from tests.qualification.coding_agents.model_kinds import ModelKind

# No agent's prompt should fill it.
_SCRIPTED_CONTEXT: Final = 131_072


def serve_recorded(recording: Path, num_tokens: int, options: list[str]) -> None:
    """`mesh serve`, recorded; ends this process with its exit code.

    Args:
        recording: File of the recording.
        num_tokens: Tokens of an answer.
        options: Options of `mesh serve`.
    """

    def create_recorded(backends: Backends, **given: Any) -> FastAPI:
        backends.first.engine = BoundedAnswers(backends.first.engine, num_tokens)
        return recorded(create_app(backends, **given), recording)

    with patch.object(serving, "create_app", create_recorded):
        command_line.main(["serve", *options])


def recorded(app: FastAPI, recording: Path) -> FastAPI:
    """The app, with its exchanges recorded as clients see them."""
    app.add_middleware(ExchangeRecorder, path=recording)
    return app


async def serve_scripted(recording: Path, port: int, keys: Path, kind: ModelKind, model: Path) -> None:
    """Serve the scripted model, recorded, until cancelled.

    Args:
        recording: File of the recording.
        port: Port on 127.0.0.1.
        keys: File of API keys.
        kind: Kind of the model.
        model: File with its vocabulary and its template.

    Raises:
        MeshError: If it cannot be served.
    """
    tokenizer = Tokenizer(model)
    backend = Backend(
        api=ApiContext(),
        engine=ScriptedModel(tokenizer, _SCRIPTED_CONTEXT, kind),
        tokenizer=tokenizer,
        model_id=model_name(model),
        created=int(time.time()),
        status=MeshStatus,
        ready=lambda: True,
    )
    app = recorded(create_app(Backends(backend), api_keys=ApiKeys.from_file(keys)), recording)
    async with serve_api(app, "127.0.0.1", port):
        await asyncio.Event().wait()


def main() -> None:
    """Serve as the arguments say."""
    kind, recording, *arguments = sys.argv[1:]
    if kind == "mesh":
        num_tokens, *options = arguments
        serve_recorded(Path(recording), int(num_tokens), options)
        return
    port, keys, model_kind, model = arguments
    given = (Path(recording), int(port), Path(keys), MODEL_KINDS[model_kind], Path(model))
    sys.exit(run_interruptible(lambda _interruption: serve_scripted(*given)))


if __name__ == "__main__":
    main()
