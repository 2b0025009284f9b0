"""`mesh slice` and `mesh certify`: a model cut into stages."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from mesh.cli.shared_options import ParsedText, int_option, local_model
from mesh.util.printable import say
from mesh.util.terminal import PrintableConsole, progress_bars
from stages.certification.certify import CertifyOptions, certify_isolated
from stages.layers import LayerRange
from stages.transport.hidden_codec import HiddenType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stages.certification.comparison import Difference, EquivalenceReport


class _Cuts(ParsedText[tuple[int, ...] | None]):
    """`all`, or layers separated by commas."""

    name = "cuts"

    def parse(self, text: str) -> tuple[int, ...] | None:
        if text == "all":
            return None
        try:
            return tuple(int(part) for part in text.split(","))
        except ValueError:
            raise ValueError(f"{text!r} is not 'all' or layers such as 5,11") from None


class _WireTypes(ParsedText[tuple[HiddenType, ...]]):
    """Wire types separated by commas."""

    name = "wires"

    def parse(self, text: str) -> tuple[HiddenType, ...]:
        try:
            return tuple(HiddenType(part) for part in text.split(","))
        except ValueError:
            raise ValueError(
                f"{text!r} is not a list of wire types: there are {', '.join(HiddenType)}"
            ) from None


class _Layers(ParsedText[LayerRange]):
    """`A:B`, layers from A up to, not including, B."""

    name = "layers"

    def parse(self, text: str) -> LayerRange:
        try:
            start, stop = text.split(":")
            return LayerRange(int(start), int(stop))
        except ValueError:
            raise ValueError(
                f"{text!r} is not a layer range; write A:B with 0 <= A < B, B not included"
            ) from None


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--cuts", type=_Cuts(), default="all", metavar="all|A,B,…", help="Layers at which to cut, each alone."
)
@int_option("--threads", default=1, help="Threads for computing.")
@click.option(
    "--wire",
    "wires",
    type=_WireTypes(),
    default=(),
    metavar="f16,q8",
    help="Wire types whose error in logits is also reported.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def certify(
    model: Path,
    cuts: tuple[int, ...] | None,
    threads: int,
    wires: tuple[HiddenType, ...],
    *,
    as_json: bool,
) -> None:
    """Compare MODEL cut in two with MODEL whole, at each cut alone.

    Prefill, decode, chunks of a long prompt and spans after going back; logits and hidden states. Then cut at
    all of them at once. Exits with 1 if a cut is not equal to the last bit; what smaller wire types cost is
    only reported. A model that cannot be cut is compared as the one stage that it makes.
    """
    model = local_model(model).path
    with progress_bars() as bars:
        bar = bars.add(f"certifying {model.name}")
        report = certify_isolated(
            model,
            cuts,
            CertifyOptions(num_threads=threads, wires=wires),
            progress=lambda done, total: bar(done / total),
        )
    if as_json:
        say(json.dumps(_as_dict(report)))
    else:
        _print_table(report)
    if not (report.is_exact or report.is_exact_onward):
        click.get_current_context().exit(1)


def _as_dict(report: EquivalenceReport) -> dict[str, object]:
    return {
        "model": report.model,
        "architecture": report.architecture,
        "n_layers": report.n_layers,
        "is_exact": report.is_exact,
        "rules": report.rules,
        "is_known": report.is_known,
        "refused_cuts": {str(cut): reason for cut, reason in report.refused_cuts.items()},
        "together": None if report.together is None else asdict(report.together),
        "cuts": [
            {
                "cut": result.cut,
                **asdict(result.difference),
                "phases": {phase.phase: asdict(phase.difference) for phase in result.phases},
                "wires": [asdict(loss) for loss in result.wire_losses],
            }
            for result in report.cuts
        ],
    }


def _print_table(report: EquivalenceReport) -> None:
    for line in _family_lines(report):
        say(line)
    table = Table(title=f"{report.model}: {report.architecture}, {report.n_layers} layers, exact mode")
    for heading in ("cut", "largest difference of logits", "at the cut", "equal tokens", "bit-equal"):
        table.add_column(heading, justify="right")
    for result in report.cuts:
        table.add_row(str(result.cut), *_cells(result.difference))
    if report.together is not None:
        table.add_row("all at once" if report.cuts else "none", *_cells(report.together))
    # A model's name may contain brackets.
    console = PrintableConsole(markup=False)
    console.print(table)
    if any(result.wire_losses for result in report.cuts):
        console.print(_losses(report))
    unequal = [result.cut for result in report.cuts if not result.difference.is_bit_equal]
    say(_conclusion(report, unequal))


def _family_lines(report: EquivalenceReport) -> list[str]:
    """Lines about the family, before the results."""
    whose = (
        "" if report.is_known else ", which has no rules of its own: a cut is used after a self-check only"
    )
    rules = ", ".join(report.rules) or "the generic ones are enough"
    lines = [f"family: {report.architecture}{whose}", f"rules: {rules}"]
    refused = report.refused_cuts
    allowed = [cut for cut in range(1, report.n_layers) if cut not in refused]
    lines.append(f"allowed cuts: {_ranges(allowed) or 'none'}")
    for reason in dict.fromkeys(refused.values()):
        cuts = [cut for cut, why in refused.items() if why == reason]
        lines.append(f"not at {_ranges(cuts)}: {reason}")
    return lines


def _conclusion(report: EquivalenceReport, unequal: Sequence[int]) -> str:
    num_cuts = len(report.cuts)
    if not report.is_exact and report.is_exact_onward:
        return "bit-equal as long as no session goes back: exact mode does not speculate with it"
    if unequal:
        return f"not bit-equal at {len(unequal)} of {num_cuts} cuts: {_listed(unequal)}"
    if not report.is_exact:
        return "not bit-equal in one piece" if not num_cuts else "not bit-equal cut at all of them at once"
    return f"bit-equal at every cut tried ({num_cuts})" if num_cuts else "bit-equal in one piece"


def _ranges(numbers: Sequence[int]) -> str:
    """Runs of neighbours as `first-last`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _losses(report: EquivalenceReport) -> Table:
    table = Table(title="what smaller wire types cost, against the whole model")
    for heading in ("cut", "wire", "largest logit diff", "mean", "largest KL, nats", "mean", "other tokens"):
        table.add_column(heading, justify="right")
    for result in report.cuts:
        for loss in result.wire_losses:
            sizes = (loss.max_logit_diff, loss.mean_logit_diff, loss.max_kl_nats, loss.mean_kl_nats)
            table.add_row(
                str(result.cut),
                loss.hidden_type,
                *(f"{size:.2g}" for size in sizes),
                f"{loss.n_changed_tokens}/{loss.n_tokens}",
            )
    return table


def _cells(difference: Difference) -> tuple[str, ...]:
    return (
        f"{difference.max_logit_diff:.3g}",
        f"{difference.max_hidden_diff:.3g}",
        f"{difference.n_equal_tokens}/{difference.n_tokens}",
        "yes" if difference.is_bit_equal else "NO",
    )


def _listed(cuts: Sequence[int]) -> str:
    return ", ".join(str(cut) for cut in cuts)


@click.command(name="slice")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--layers", type=_Layers(), required=True, metavar="A:B", help="Layers from A up to, not including, B."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, metavar="OUT", help="The stage file."
)
def slice_(model: Path, layers: LayerRange, output: Path) -> None:
    """Write layers A to B of MODEL as a stage: a smaller GGUF that llama.cpp loads.

    MODEL is a GGUF file, the first one if there are several, or hf:org/repo:QUANT.
    """
    from stages.certification.certify import cut_stage  # noqa: PLC0415 - keeps --help quick

    model = local_model(model).path
    with progress_bars() as bars:
        bar = bars.add(f"cutting {model.name}, layers {layers}")
        cut_stage(model, layers, output, progress=lambda done, total: bar(done / total))
    say(f"{output}: layers {layers} of {model.name}, {output.stat().st_size:,} bytes")
