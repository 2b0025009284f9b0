"""Certification of every architecture.

    python -m tests.qualification.tiny_models models/d1
    python -m tests.qualification.tiny_models models/d2 --depth 2
    python -m tests.qualification.families models/d1 models/d2 --output record.json
    python -m tests.qualification.families --images --output record.json

One record a model: its family, the rules it needed, where it may be cut, and whether that is bit-equal; or
why it is refused; and how its sessions go back. With `--images` one record of each family that reads
pictures. Exits with 1 if a cut that is allowed is not equal to the last bit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mesh.util.logs import set_up_logs
from mesh.util.terminal import progress_bars
from meshbench.lab.llama_cpp_build import unpacked_source
from spanmesh_proto.errors import MeshError
from stages.certification.certify import CertifyOptions, certify, certify_isolated
from stages.gguf import read_header
from stages.isolated import ProcessEnded, call
from stages.slicing.source_model import read_source
from tests.qualification.architectures import WITHOUT_MODEL, listed_architectures
from tests.qualification.families_table import (
    FamilyRecord,
    GoesBack,
    Outcome,
    PictureRecord,
    counts,
    to_json,
)
from tests.qualification.picture_certification import examine_pictures, examine_refused
from tests.qualification.picture_families import PICTURE_FAMILIES, REFUSED_FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stages.certification.comparison import EquivalenceReport
    from stages.slicing.source_model import SourceModel

# Tiny models show everything in a few rows.
_OPTIONS = CertifyOptions(n_prompt=20, n_decode=6)


class Certifier:
    """Certifies one model after the other in one process beside this one, which llama.cpp may abort."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, model: Path) -> EquivalenceReport:
        """`certify` at every cut that is allowed."""
        if self._pool is None:
            spawning = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=spawning, initializer=_quiet)
        try:
            return self._pool.submit(certify, model, None, _OPTIONS).result()
        except BrokenProcessPool:
            self.close()
            # Once more where its last words are heard.
            return certify_isolated(model, None, _OPTIONS)

    def close(self) -> None:
        """End the process."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


def _quiet() -> None:
    set_up_logs()
    os.environ["GGML_NO_BACKTRACE"] = "1"  # or an abort starts a debugger


def examine(model: Path, certified: Callable[[Path], EquivalenceReport]) -> FamilyRecord:
    """Certify one model at every cut that its rules allow.

    Args:
        model: The file.
        certified: How.
    """
    try:
        source = read_source(model)
    except MeshError as error:
        return FamilyRecord(model.name, Outcome.REFUSED, error.message, _architecture(model))
    record = _before(source)
    try:
        report = certified(model)
    except MeshError as error:
        return record.failed(error.message, is_known=source.is_known)
    return _after(record, report, is_known=source.is_known)


def _architecture(model: Path) -> str:
    try:
        return read_header(model).architecture
    except MeshError:
        return ""


def _before(source: SourceModel) -> FamilyRecord:
    return FamilyRecord(
        source.header.path.name,
        Outcome.REFUSED,
        architecture=source.header.architecture,
        n_layers=source.n_layers,
        rules=tuple(rule.name for rule in source.rules_used),
        is_known=source.is_known,
        # To checkpoints only once that is certified.
        goes_back=GoesBack.NO if source.family.has_recurrent_state else GoesBack.POSITION,
        allowed_cuts=source.allowed_cuts,
        refused_cuts={str(cut): reason for cut, reason in source.refused_cuts.items()},
        reason="" if source.allowed_cuts else next(iter(source.refused_cuts.values()), "it has one layer"),
    )


def _after(record: FamilyRecord, report: EquivalenceReport, *, is_known: bool) -> FamilyRecord:
    if report.is_exact or report.is_exact_onward:
        record = _with_checkpoints(record, report)
        return record.bit_equal() if record.allowed_cuts else record
    unequal = [result for result in report.cuts if not result.difference.is_bit_equal]
    if unequal:
        worst = max(unequal, key=lambda result: result.difference.max_logit_diff)
        reason = (
            f"cut at {', '.join(str(result.cut) for result in unequal)} logits differ by up to "
            f"{worst.difference.max_logit_diff:.3g}, hidden states by {worst.difference.max_hidden_diff:.3g}"
        )
    else:
        reason = "cut at all these places at once, or at none, logits differ"
    return record.failed(reason, is_known=is_known)


def _with_checkpoints(record: FamilyRecord, report: EquivalenceReport) -> FamilyRecord:
    """The same, with how a model with recurrent layers goes back."""
    found = report.with_checkpoints
    if found is None:
        return record
    if found.is_bit_equal:
        return replace(record, goes_back=GoesBack.CHECKPOINTS)
    return replace(
        record,
        why_no_checkpoints="several rows at once, or rows after going back to a checkpoint, differ by up to "
        f"{found.max_logit_diff:.2g} from the same rows one by one",
    )


def examine_all_pictures(names: Sequence[str], progress: Callable[[float], None]) -> list[PictureRecord]:
    """Certify families that read pictures, each and in each numeric mode in a process of its own.

    Args:
        names: Of `PICTURE_FAMILIES` and `REFUSED_FAMILIES`.
        progress: Called with the share that is done.
    """
    records = []
    for done, name in enumerate(names, 1):
        modes = (True, False) if name in PICTURE_FAMILIES else (True,)
        found = [_in_process(name, exact=exact) for exact in modes]
        records.append(next((each for each in found if each.outcome is Outcome.WRONG), found[0]))
        progress(done / len(names))
    return records


def _in_process(name: str, *, exact: bool) -> PictureRecord:
    try:
        record: PictureRecord = call(_examine_pictures, name, exact)
    except ProcessEnded as end:
        return PictureRecord(name, Outcome.WRONG, f"llama.cpp ended the process, exact={exact}: {end}")
    return record


def _examine_pictures(name: str, exact: bool, _report: object) -> PictureRecord:  # noqa: FBT001 - of a process
    _quiet()
    with tempfile.TemporaryDirectory(prefix="spanmesh-pictures-") as folder:
        if name in PICTURE_FAMILIES:
            return examine_pictures(name, PICTURE_FAMILIES[name], Path(folder), exact=exact)
        return examine_refused(name, REFUSED_FAMILIES[name], Path(folder))


@click.command()
@click.argument("folders", type=click.Path(exists=True, file_okay=False, path_type=Path), nargs=-1)
@click.option("--images", "has_images", is_flag=True, help="Certify the families that read pictures.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the record there, as JSON.")
@click.option("--only", default="", help="Only models whose names contain this.")
def main(folders: tuple[Path, ...], output: Path | None, only: str, *, has_images: bool) -> None:
    """Certify every GGUF file in FOLDERS at every cut that its family's rules allow.

    The record has llama.cpp's list of architectures as well, from the source that `SPANMESH_LLAMA_CPP` names
    or that the lab has unpacked. What is not certified by this call stays in it as it was.
    """
    set_up_logs()
    if not folders and not has_images:
        raise click.UsageError("name folders of models, or --images")
    source = unpacked_source()
    if folders and output is not None and source is None:
        raise click.UsageError("there is no source of llama.cpp: name its folder in SPANMESH_LLAMA_CPP")
    recorded = _certify_folders(folders, only)
    pictures = _certify_pictures(only) if has_images else []
    if output is not None:
        is_there = output.exists()
        document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8")) if is_there else {}
        if folders:
            document |= _document(recorded, () if source is None else listed_architectures(source))
        if has_images:
            document["pictures"] = [to_json(record) for record in pictures]
        output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    outcomes = {each.outcome for each in pictures}
    outcomes.update(each.outcome for records in recorded.values() for each in records)
    if Outcome.WRONG in outcomes:
        click.get_current_context().exit(1)


def _certify_folders(folders: Sequence[Path], only: str) -> dict[str, list[FamilyRecord]]:
    recorded: dict[str, list[FamilyRecord]] = {}
    models = [
        (folder, model) for folder in folders for model in sorted(folder.glob("*.gguf")) if only in model.name
    ]
    with progress_bars() as bars, closing(Certifier()) as certified:
        bar = bars.add(f"certifying {len(models)} models")
        for done, (folder, model) in enumerate(models, 1):
            record = examine(model, certified)
            recorded.setdefault(folder.name, []).append(record)
            if record.outcome is not Outcome.BIT_EQUAL:
                click.echo(f"{folder.name}/{record.model}: {record.outcome}: {record.reason}", err=True)
            if record.why_no_checkpoints:
                click.echo(
                    f"{folder.name}/{record.model}: no checkpoints: {record.why_no_checkpoints}", err=True
                )
            bar(done / len(models))
    for name, records in recorded.items():
        click.echo(f"{name}: {counts(records)}")
    return recorded


def _certify_pictures(only: str) -> list[PictureRecord]:
    names = [name for name in (*PICTURE_FAMILIES, *REFUSED_FAMILIES) if only in name]
    with progress_bars() as bars:
        records = examine_all_pictures(names, bars.add(f"certifying {len(names)} families with pictures"))
    for record in records:
        cuts = f"{len(record.allowed_cuts)} of {record.n_layers - 1} cuts"
        shown = cuts if record.outcome is Outcome.BIT_EQUAL else record.reason
        click.echo(
            f"{record.family:40} {record.architecture:14} {record.projector:18} {record.outcome}: {shown}"
        )
    click.echo(f"pictures: {counts(records)}")
    return records


def _document(recorded: dict[str, list[FamilyRecord]], listed: Sequence[str]) -> dict[str, Any]:
    return {
        "llama_cpp_python": version("llama-cpp-python"),
        "architectures": [*listed],
        "without_model": dict(sorted(WITHOUT_MODEL.items())),
        "runs": {name: [to_json(record) for record in records] for name, records in recorded.items()},
    }


if __name__ == "__main__":
    main()
