"""Speculation behind pictures: the same texts as without it, and no row of a picture is ever proposed.

    python -m tests.qualification.pictures.speculation

A mesh of two stages on this machine, in exact mode, with proposals of a fixed length. Conversations repeat a
text and the picture behind it, so that a text which goes on like them foretells a picture. Each is asked
without speculation, then with n-grams and earlier answers, with a draft model, which stands back behind
pictures, and with all of them. A row of a picture in a window is refused by the first stage, which fails the
request.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import click
import httpx
import structlog

from mesh.cli.own_mesh import own_mesh
from mesh.cli.shared_options import int_option
from mesh.serve.options import demo_model
from meshbench.experiment import experiment
from meshbench.report_tools import Line, Report, table_section
from meshbench.shared_options import json_option, logs_folder, logs_option, seed_option
from stages.process_limits import num_usable
from tests.qualification.bounded_report import bounded_report
from tests.support.colour_words import image_url, write_colours
from tests.support.tiny_projectors import ColourWords

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_TOKENS: Final = 64
_MODES: Final = ("ngram", "draft", "auto")
_FORMS: Final = (
    "Look at this: {}",
    "Picture number one: {}",
    "The next color is {}",
    "Here: {}",
)
_QUESTION: Final = "Go on exactly as before, with the next picture."

log = structlog.get_logger()


@dataclass
class Findings:
    """What came out, by mode."""

    asked: Counter[str] = field(default_factory=Counter)
    """Answers."""
    proposed: Counter[str] = field(default_factory=Counter)
    """Tokens that were proposed for them."""
    accepted: Counter[str] = field(default_factory=Counter)
    """Those among them that were accepted."""
    different: list[tuple[str, str]] = field(default_factory=list)
    """Mode, and the answer where it is not that without speculation."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Mode, and why there is no answer."""


def conversation(draw: random.Random) -> list[dict[str, Any]]:
    """A message that repeats a text and the picture behind it."""
    before, _, _ = draw.choice(_FORMS).partition("{}")
    word = draw.choice(sorted(ColourWords.WORDS))
    content: list[dict[str, Any]] = []
    for _ in range(draw.randrange(2, 5)):
        content += [{"type": "text", "text": before}, image_url(word)]
    return [{"role": "user", "content": [*content, {"type": "text", "text": f"{_QUESTION} {before}"}]}]


def measure(folder: Path, number: int, seed: int) -> Findings:
    """Serve the model, and ask all conversations in all modes.

    Args:
        folder: For files and logs.
        number: Conversations.
        seed: Of them.

    Raises:
        MeshError: If the mesh does not come up.
    """
    model, findings, draw = demo_model(), Findings(), random.Random(seed)
    arguments = [
        *(str(model), "--mmproj", str(write_colours(folder / "mmproj.gguf", model)), "--exact"),
        *("--stages", "2", "--threads", "1", "--ctx-size", "512", "--parallel", "2"),
        *("--draft", str(model), "--set", "spec-width=3", "--set", "spec-depth=2"),
    ]
    with (
        (folder / "mesh.log").open("w+b") as mesh_log,
        own_mesh(arguments, mesh_log) as mesh,
        httpx.Client(base_url=mesh.url, timeout=120.0, trust_env=False) as http,
    ):
        for _ in range(number):
            messages = conversation(draw)
            wanted = _answer(http, messages, "off", findings)
            for mode in _MODES:
                found = _answer(http, messages, mode, findings)
                if found != wanted:
                    findings.different.append((mode, str(found)))
        log.info("asked", **findings.asked)
    return findings


def _answer(
    http: httpx.Client, messages: list[dict[str, Any]], mode: str, findings: Findings
) -> list[int] | None:
    body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": _TOKENS}
    more = {"speculation": {"mode": mode}, "ignore_eos": True, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json={**body, **more})
    findings.asked[mode] += 1
    if answer.status_code != 200:
        findings.refused.append((mode, answer.text[:300]))
        return None
    told: Mapping[str, Any] = answer.json()
    findings.proposed[mode] += told["timings"]["draft_n"]
    findings.accepted[mode] += told["timings"]["draft_n_accepted"]
    found: list[int] = told["choices"][0]["token_ids"]
    return found


def lines(findings: Findings) -> list[Line]:
    """The figures with their bounds."""
    asked = sum(findings.asked.values())
    return [
        Line(
            "texts that differ from those without speculation",
            len(findings.different),
            0,
            is_ceiling=True,
            note=f"of {asked - findings.asked['off']}",
        ),
        Line("answers that failed", len(findings.refused), 0, is_ceiling=True, note=f"of {asked}"),
        Line("tokens proposed without speculation", findings.proposed["off"], 0, is_ceiling=True),
        Line("tokens proposed with n-grams", findings.proposed["ngram"], 1),
    ]


def report(findings: Findings, number: int, seed: int) -> Report:
    """Proposals by mode, and the figures with their bounds."""
    conditions = {"conversations": number, "seed": seed, "numeric mode": "exact", "cores": num_usable()}
    rows = [
        (mode, str(count), str(findings.proposed[mode]), str(findings.accepted[mode]))
        for mode, count in findings.asked.items()
    ]
    return bounded_report(
        "Speculation behind pictures",
        conditions,
        lines(findings),
        table_section("## Proposals", ("mode", "answers", "proposed", "accepted"), rows),
        table_section("## Failures", ("mode", "reason"), findings.refused),
    )


@click.command()
@int_option("--conversations", "number", default=24, metavar="N", help="Conversations.")
@seed_option("Of the conversations.")
@logs_option()
@json_option
@experiment
def main(*, number: int, seed: int, logs: Path | None) -> Report:
    """Compare answers to pictures with and without speculation, on a mesh of this machine.

    Prints counts with their bounds, and exits with 1 if one is missed.
    """
    with logs_folder(logs) as folder:
        return report(measure(folder, number, seed), number, seed)


if __name__ == "__main__":
    main()
