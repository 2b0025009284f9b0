"""`mesh load` and `mesh unload`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import click

from mesh.cli.head_client import ask_head
from mesh.cli.options import OptionsCommand, made
from mesh.cli.shared_options import head_options, key_of, local_model, projector_for, served_model
from mesh.options.model import API, PLACEMENT, SESSIONS, SPECULATION, LoadRequest
from mesh.status import read_status
from mesh.util.printable import say
from spanmesh_proto.errors import MeshError
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

# Sending weights may take hours.
_LOAD_TIMEOUT_S: Final = 86400.0
_POLL_S: Final = 1.0
_SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "Head": ("--url", "--api-key-file"),
    **dict.fromkeys((API, PLACEMENT, SESSIONS, SPECULATION), ()),
}
_WAIT_S: Final = 30.0
_MOST_WAIT_S: Final = 86400.0
# Besides the wait: for ending the stages.
_UNLOAD_TIMEOUT_S: Final = 60.0


@click.command(cls=OptionsCommand, options=LoadRequest, sections=_SECTIONS)
@click.argument("model", type=click.Path(path_type=Path))
@head_options
def load(model: Path, url: str, api_key_file: Path | None, **values: Any) -> None:
    """Load MODEL into a running mesh, beside its other models.

    To be run on the head. MODEL is a GGUF file, the first one if there are several, or hf:org/repo:QUANT. It
    is placed in the memory that is left; if that is too little, nothing changes and an error says how much is
    missing. Returns when the model answers. Ctrl-C does not stop the loading: `mesh unload` does.
    """
    wanted = {name: _whole(value) if isinstance(value, Path) else value for name, value in values.items()}
    # Refused here, if it contradicts itself, before a model is fetched.
    made(LoadRequest, {**wanted, "model": str(model)})
    if (drafter := values.get("draft_path")) is not None:
        wanted["draft_path"] = _whole(local_model(drafter).path)
    pulled = served_model(model)
    if not wanted["embeddings"]:
        wanted["mmproj"] = projector_for(values["mmproj"], model, pulled.path)
    request = made(LoadRequest, {**wanted, "model": str(_whole(pulled.path))})
    order = request.model_dump(mode="json")
    head, key = url.rstrip("/"), key_of(api_key_file)
    answer = _watched(head, key, order)
    for stage in answer["stages"]:
        threads = "one thread" if stage["threads"] == 1 else f"{stage['threads']} threads"
        size = format_size(stage["bytes"])
        say(f"  {stage['host']}: layers {stage['layers']}, {size}, {threads}")
    if (context := answer.get("context")) is not None:
        say(f"  {context}")
    name = answer["model"]
    where = f"{head}/v1/embeddings" if order["embeddings"] else f"{head}/v1"
    say(f'{name} is served at {where} ({answer["plan"]}): send "model": "{name}".')


def _watched(head: str, key: str | None, order: Mapping[str, Any]) -> dict[str, Any]:
    """Answer of the head; prints the phases meanwhile."""
    import threading  # noqa: PLC0415 - keeps --help quick
    from concurrent.futures import Future  # noqa: PLC0415

    answer: Future[dict[str, Any]] = Future()

    def ask() -> None:
        try:
            answer.set_result(
                ask_head(f"{head}/mesh/load", key, method="POST", body=order, timeout_s=_LOAD_TIMEOUT_S)
            )
        except Exception as error:  # noqa: BLE001 - raised below, whatever it is
            answer.set_exception(error)

    # Ctrl-C does not wait for the thread.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    name, said = order["name"] or _served_name(order["model"]), ""
    while asking.is_alive():
        asking.join(_POLL_S)
        phase = _phase(head, key, name) if asking.is_alive() else ""
        if phase and phase != said:
            said = phase
            say(f"{name}: {phase}", err=True)
    return answer.result()


def _phase(head: str, key: str | None, name: str) -> str:
    try:
        models = read_status(ask_head(f"{head}/mesh/status", key)).models
    except MeshError:
        # Too many requests for the key, perhaps: the load continues.
        time.sleep(_POLL_S)
        return ""
    return next((model.phase for model in models if model.name == name), "")


def _served_name(model: str) -> str:
    from stages.gguf import model_name  # noqa: PLC0415 - keeps --help quick

    return model_name(Path(model))


def _whole(path: Path) -> Path:
    """An absolute path: the head may run in another folder. Links are not followed, see `StageConfig`."""
    return path.absolute()


@click.command()
@click.argument("name")
@head_options
@click.option(
    "--wait",
    "wait_s",
    default=_WAIT_S,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(0, _MOST_WAIT_S),
    help="Time for running requests to end.",
)
def unload(name: str, url: str, api_key_file: Path | None, wait_s: float) -> None:
    """Unload the model NAME and free its memory on every host.

    To be run on the head. New requests for it are refused at once. The model of `mesh serve` cannot be
    unloaded.
    """
    answer = ask_head(
        f"{url.rstrip('/')}/mesh/unload?model={quote(name, safe='')}&wait_s={wait_s:g}",
        key_of(api_key_file),
        method="POST",
        timeout_s=wait_s + _UNLOAD_TIMEOUT_S,
    )
    ended = f" {answer['ended']} requests were ended." if answer["ended"] else ""
    say(f"{name} was unloaded, and its memory on the hosts is free.{ended}")
