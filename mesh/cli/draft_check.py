"""`mesh draft check`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mesh.cli.shared_options import int_option, local_model
from mesh.util.printable import say
from spanmesh_proto.errors import ModelError
from speculative.proposer import DrafterKind
from stages.gguf import read_header
from stages.units import format_size

if TYPE_CHECKING:
    from mesh.draft.loading import CheckedDrafter


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--for",
    "target",
    type=click.Path(path_type=Path),
    metavar="MODEL",
    help="The model that it is to draft for: a GGUF file or hf:org/repo:QUANT; the one beside FILE unless "
    "given.",
)
@int_option("--ctx-size", default=4096, least=16, metavar="N", help="Positions of one session.")
@int_option("--parallel", default=4, most=64, metavar="N", help="Concurrent sessions.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(file: Path, target: Path | None, *, ctx_size: int, parallel: int, as_json: bool) -> None:
    """Check that FILE can draft for MODEL, and show what it costs.

    FILE is a small model, an EAGLE-3, DFlash or DSpark drafter, a head for multi-token prediction or an
    assistant of Gemma 4, as a GGUF file or hf:org/repo:NAME; MODEL itself stands for the head that it brings.
    It is loaded in a process of its own and drafts a few tokens. What does not fit is refused with the
    reason, as `mesh serve` would.
    """
    from mesh.draft.assistant_trial import check_any_drafter  # noqa: PLC0415 - keeps --help quick
    from speculative.draft.context import DraftOptions  # noqa: PLC0415

    path = local_model(file).path
    model = _model_beside(path) if target is None else local_model(target).path
    found = check_any_drafter(path, model, DraftOptions(ctx_size=ctx_size, num_sessions=parallel))
    command = _command(file, path, target or model, model)
    if as_json:
        say(json.dumps({**asdict(found), "command": command or None}, indent=2))
    else:
        say(_as_text(found, path, model, command))


def _model_beside(drafter: Path) -> Path:
    """The only model beside a drafter that it fits.

    Raises:
        ModelError: If there is none, or several.
    """
    from mesh.draft.pairs import models_beside  # noqa: PLC0415 - keeps --help quick

    read_header(drafter)
    found = list(models_beside(drafter))
    if len(found) == 1:
        return found[0]
    trouble = f"{len(found)} models" if found else "no model"
    among = f": {', '.join(path.name for path in found)}" if found else ""
    raise ModelError(f"{trouble} beside {drafter} that it could draft for{among}; name one with --for")


def _command(file: Path, path: Path, target: Path, model: Path) -> str:
    """The command that serves the pair; empty for a model's own head, which needs none."""
    from mesh.draft.drafter import serving_command  # noqa: PLC0415 - keeps --help quick

    return "" if path.samefile(model) else serving_command(target, file)


def _as_text(found: CheckedDrafter, file: Path, model: Path, command: str) -> str:
    lines = [f"{file.name}: {found.kind.label} that fits {model.name}"]
    rows = [("layers", f"{found.n_layers}")]
    if found.read_layers:
        amount = f"{format_size(found.feature_bytes_per_token)} a token in f16"
        layers = f"hidden states after layers {', '.join(map(str, found.read_layers))}"
        is_head_state = found.read_layers == (found.n_target_layers,)
        rows.append(("reads", f"{'the head state' if is_head_state else layers}: {amount}"))
    own = "" if found.num_own_tokens is None else f"; it drafts {found.num_own_tokens:,} of them"
    rows.append(("vocabulary", f"{found.num_tokens:,} tokens, the model's{own}"))
    taken = f", {format_size(found.loaded_bytes)} with {', '.join(found.lacks)} of the model"
    rows.append(("file", format_size(found.file_bytes) + (taken if found.lacks else "")))
    sessions = f"{found.num_sessions} sessions of {found.ctx_size:,} positions"
    place = "beside the last stage" if found.kind is DrafterKind.ASSISTANT else "on the head"
    rows.append(("memory", f"{format_size(found.memory_bytes)} {place} for {sessions}"))
    rows.append(("speed", f"{found.draft_ms_per_token:.2f} ms a drafted token on this host"))
    if found.block_tokens is not None:
        block_ms = found.draft_ms_per_token * found.block_tokens
        timed = f"{block_ms:.1f} ms for {found.block_tokens} on this host"
        rows.append(("block", f"{found.most_drafted} tokens in one pass at most, {timed}"))
    if command:
        rows.append(("command", command))
    return "\n".join([*lines, *(f"  {name:<11}{text}" for name, text in rows)])
