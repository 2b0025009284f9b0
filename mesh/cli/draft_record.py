"""`mesh draft record`."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mesh.cli.head_client import ask_head
from mesh.cli.options import arguments_of, options_of
from mesh.cli.own_mesh import own_mesh
from mesh.cli.shared_options import (
    float_option,
    head_options,
    int_option,
    key_of,
    local_model,
    option_group,
)
from mesh.options.host import HeadOptions
from mesh.status import read_status
from mesh.util.printable import say
from mesh.util.terminal import progress_bars
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.status import RecordingStatus
    from mesh.tuning.prompts import OwnPrompts, Prompt
    from mesh.tuning.regenerate import Regenerated, Wanted

_SHOWN_REASONS: Final = 3
# Answers are written shortly after their end.
_WRITE_PATIENCE_S: Final = 5.0
_POLL_S: Final = 0.1

answer_options: Final = option_group(
    float_option("--temperature", default=0.7, most=2.0, metavar="T", help="Temperature of the answers."),
    int_option("--max-tokens", default=512, metavar="N", help="Limit of tokens of an answer."),
    options_of(HeadOptions, "parallel"),
)


@click.command()
@click.argument("prompts", metavar="PROMPTS|own:N")
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="FOLDER",
    help="The recording; with --url the folder in which that mesh records.",
)
@click.option(
    "--for",
    "model",
    type=click.Path(path_type=Path),
    metavar="MODEL",
    help="Serve this model for the time: a GGUF file or hf:org/repo:QUANT; the mesh at --url unless given.",
)
@head_options
@answer_options
@click.option("--raw", "is_raw", is_flag=True, help="Continue each prompt as it stands, without a template.")
@options_of(HeadOptions, "draft_path", "tap_layers", "record_bytes")
def record(
    prompts: str,
    folder: Path,
    model: Path | None,
    url: str,
    api_key_file: Path | None,
    *,
    temperature: float,
    max_tokens: int,
    parallel: int,
    is_raw: bool,
    draft_path: Path | None,
    tap_layers: tuple[int, ...],
    record_bytes: int | None,
) -> None:
    """Record a model's own answers to prompts, to tune a drafter on them.

    PROMPTS is a file of JSON lines with `prompt` or `messages`, or Spec-Bench's question.jsonl; with own:N
    the model writes N prompts itself. Answers that FOLDER holds are not asked for again.
    """
    from mesh.tuning.prompts import read_prompts  # noqa: PLC0415 - keeps --help quick
    from mesh.tuning.regenerate import Wanted  # noqa: PLC0415

    found = read_prompts(prompts, Path(prompts), is_raw=is_raw)
    wanted = Wanted(temperature, max_tokens, parallel, is_raw=is_raw)
    if model is not None:
        options = arguments_of(
            HeadOptions,
            draft_path=None if draft_path is None else local_model(draft_path).path,
            record_bytes=record_bytes,
            tap_layers=tap_layers,
        )
        result = record_by_own_mesh(local_model(model).path, found, folder, wanted, options)
    elif draft_path is not None or tap_layers or record_bytes is not None:
        raise click.UsageError(
            "drafter, layers and limit are those of the mesh that records: name them with --for MODEL"
        )
    else:
        url = url.rstrip("/").removesuffix("/v1")
        result = _record(url, key_of(api_key_file), folder, found, wanted)
    tell(result, folder)


def record_by_own_mesh(
    model: Path,
    prompts: Sequence[Prompt] | OwnPrompts,
    folder: Path,
    wanted: Wanted,
    options: Sequence[str],
) -> Regenerated:
    """Record answers of a model that is served for the time.

    Args:
        model: Its file.
        prompts: What is asked.
        folder: The recording.
        wanted: How answers are asked for.
        options: Of `mesh serve`, such as `--tap-layers`.

    Raises:
        MeshError: If it cannot be served, or the folder is another recording.
    """
    with ExitStack() as stack:
        served = arguments_of(HeadOptions, parallel=wanted.num_parallel, record_path=folder.absolute())
        # Without a name, so that nothing is left of it, however this process ends.
        log = stack.enter_context(tempfile.TemporaryFile())
        mesh = own_mesh([str(model), *served, *options], log, what=f"the mesh of {model}")
        return _record(stack.enter_context(mesh).url, None, folder, prompts, wanted)


def _record(
    url: str, key: str | None, folder: Path, prompts: Sequence[Prompt] | OwnPrompts, wanted: Wanted
) -> Regenerated:
    """Answers of the mesh at a URL, which has to record into the folder."""
    before = _require_recorded(url, key, folder)
    result = asyncio.run(_regenerated(url, key, folder, prompts, wanted))
    _check_written(url, key, folder, before, result.num_answers)
    return result


def _check_written(
    url: str, key: str | None, folder: Path, before: RecordingStatus, num_answers: int
) -> None:
    """Say which answers a mesh did not record, once it has written the others.

    Raises:
        ClusterError: If it has recorded none.
    """
    deadline_s = time.monotonic() + _WRITE_PATIENCE_S
    while True:
        after = _require_recorded(url, key, folder)
        num_written, num_left_out = after.written - before.written, after.left_out - before.left_out
        if num_written + num_left_out >= num_answers or time.monotonic() > deadline_s:
            break
        time.sleep(_POLL_S)
    why = after.off or "hidden states did not come, or the key may not be recorded any more"
    if num_left_out and not num_written:
        raise ClusterError(f"{folder}: none of {num_answers} answers was recorded: {why}")
    if num_left_out:
        say(f"{num_left_out} answers were not recorded: {why}", err=True)


def _require_recorded(url: str, key: str | None, folder: Path) -> RecordingStatus:
    """Status of the recording of a mesh, which has to be that of a folder.

    Raises:
        ClusterError: If it does not, with the remedy.
    """
    from mesh.tuning.recording_folder import writer_of  # noqa: PLC0415 - keeps --help quick

    recording: RecordingStatus | None = read_status(ask_head(f"{url}/mesh/status", key)).recording
    if recording is None:
        raise ClusterError(
            f"the mesh at {url} records nothing: start it with `mesh serve MODEL --record {folder}`, or have "
            "a model served for the time with --for MODEL"
        )
    if recording.id != writer_of(folder):
        raise ClusterError(
            f"the mesh at {url} does not record into {folder}: name the folder of its --record, on its host"
        )
    return recording


async def _regenerated(
    url: str, key: str | None, folder: Path, prompts: Sequence[Prompt] | OwnPrompts, wanted: Wanted
) -> Regenerated:
    from mesh.tuning.recording_folder import recorded_prompts  # noqa: PLC0415 - keeps --help quick
    from mesh.tuning.regenerate import ChatServer, Regeneration  # noqa: PLC0415

    with progress_bars() as bars:
        bar = bars.add(f"recording answers in {folder.name}")
        async with ChatServer(url, key) as server:
            regeneration = Regeneration(
                server, wanted, recorded_prompts(folder), lambda done, total: bar(done / total)
            )
            return await regeneration.run(prompts)


def tell(result: Regenerated, folder: Path, *, err: bool = False) -> None:
    """Say what was recorded, on standard error if `err`, and there what was refused."""
    known = f"; {result.num_known} prompts had been recorded before" if result.num_known else ""
    say(f"{folder}: {result.num_answers} answers of {result.num_tokens:,} tokens recorded{known}", err=err)
    for reason, count in result.refused.most_common(_SHOWN_REASONS):
        say(f"{count} prompts were left out: {reason}", err=True)
