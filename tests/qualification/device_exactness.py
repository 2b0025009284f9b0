"""Exactness of devices: whether rows depend on the rows that are computed with them.

    python -m tests.qualification.device_exactness --device Vulkan0

The same rows are computed one by one, several at once, and beside those of other sequences, behind few and
many cached positions, with the settings of exact mode: each sequence has a cache of its own, attention is
fused, and weights are as the file has them. Whatever differs in a bit bars the device from exact mode.
Settings of the backend that choose other kernels are tried one after the other, each in a process of its own.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import numpy as np

from mesh.util.logs import set_up_logs
from meshbench.report_tools import markdown_table
from spanmesh_proto.errors import MeshError
from stages.isolated import ProcessEnded, call
from stages.runtime.numerics import EXACT_MAX_ROWS, VERDICTS, Verdict, backend_of
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.source_model import read_source
from tests.qualification.device_parity import first_device, random_prompt
from tests.qualification.random_model import SHAPES, write_random_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

# Rows at once; kernels change at small numbers and at multiples of eight.
_WIDTHS: Final = (2, 3, 4, 5, 8, 9, 16, 17, 32, 33, EXACT_MAX_ROWS)
# Positions before the rows; attention is divided otherwise over many.
_DEPTHS: Final = (4, 130, 600)
_NUM_SLOTS: Final = 4
_CHUNK_ROWS: Final = 32
_ON_TRIAL: Final = Verdict(is_exact=True, reason="it is being measured")

SETTINGS: Final[Mapping[str, Mapping[str, Mapping[str, str]]]] = {
    "Vulkan": {
        "as it is": {},
        "without fusion": {"GGML_VK_DISABLE_FUSION": "1"},
        "without integer products": {
            "GGML_VK_DISABLE_INTEGER_DOT_PRODUCT": "1",
            "GGML_VK_DISABLE_MMVQ": "1",
            "GGML_VK_DISABLE_FUSION": "1",
        },
        "without matrix cores": {"GGML_VK_DISABLE_COOPMAT": "1", "GGML_VK_DISABLE_COOPMAT2": "1"},
        "without half precision": {"GGML_VK_DISABLE_F16": "1", "GGML_VK_DISABLE_FUSION": "1"},
    },
    "CUDA": {
        "as it is": {},
        "without fusion": {"GGML_CUDA_DISABLE_FUSION": "1"},
    },
    "MTL": {
        "as it is": {},
        "without fusion": {"GGML_METAL_FUSION_DISABLE": "1"},
    },
}
"""Environment variables by backend and name of the setting."""
_PLAIN: Final[Mapping[str, Mapping[str, str]]] = {"as it is": {}}


@dataclass(frozen=True)
class RowsResult:
    """Rows computed in two ways."""

    depth: int
    """Cached positions before them."""
    num_rows: int
    """Rows computed at once; 1 for one row beside rows of other sequences."""
    max_difference: float
    """Largest absolute difference of two logits, as a share of the largest logit."""
    is_bit_equal: bool
    """Whether all bits are equal."""


@dataclass(frozen=True)
class Exactness:
    """Result for one setting."""

    setting: str
    """Name of the setting."""
    device: str
    """Description of the device."""
    rows: tuple[RowsResult, ...]
    """Results, in the order of depths and numbers of rows."""
    failure: str = ""
    """Reason why it could not be measured; empty if it could."""

    @property
    def is_exact(self) -> bool:
        """Whether no row depends on its batch."""
        return not self.failure and all(row.is_bit_equal for row in self.rows)

    @property
    def summary(self) -> str:
        """What was found, in a few words."""
        if self.failure:
            return self.failure
        differing = [row for row in self.rows if not row.is_bit_equal]
        if not differing:
            return f"all of {len(self.rows)} comparisons are bit-equal"
        widths = sorted({row.num_rows for row in differing})
        worst = max(row.max_difference for row in differing)
        return (
            f"{len(differing)} of {len(self.rows)} comparisons differ, with {', '.join(map(str, widths))} "
            f"rows, by up to {worst:.1e} of the largest logit"
        )


def measure_rows(
    path: Path, device: str, *, widths: Sequence[int] = _WIDTHS, depths: Sequence[int] = _DEPTHS
) -> tuple[RowsResult, ...]:
    """Compute rows in different company on a device; in a process that may compute in exact mode.

    Args:
        path: A whole model, a GGUF file.
        device: llama.cpp's name of the device.
        widths: Rows at once.
        depths: Cached positions before them.

    Raises:
        MeshError: If the model cannot be loaded or computed.
    """
    backend = backend_of(device)
    known = VERDICTS.get(backend)
    VERDICTS[backend] = _ON_TRIAL
    options = RuntimeOptions(
        num_slots=_NUM_SLOTS,
        ctx_size=max(depths) + max(widths),
        exact=True,
        gpu_layers=((device, read_source(path).n_layers),),
    )
    try:
        with closing(StageRuntime(path, options)) as runtime:
            return tuple(_compared(runtime, widths, depths))
    finally:
        del VERDICTS[backend]
        if known is not None:
            VERDICTS[backend] = known


def _compared(runtime: StageRuntime, widths: Sequence[int], depths: Sequence[int]) -> Iterator[RowsResult]:
    text = random_prompt(runtime.info.n_vocab, max(depths) + max(widths))
    for depth in depths:
        for start in range(0, depth, _CHUNK_ROWS):
            stop = min(start + _CHUNK_ROWS, depth)
            runtime.decode([Span(0, start, text[start:stop])])
        rows = text[depth : depth + max(widths)]
        alone = np.concatenate(
            [
                runtime.decode([Span(0, depth + index, [token], num_outputs=1)])[0]
                for index, token in enumerate(rows)
            ]
        )
        for width in widths:
            (together,) = runtime.decode([Span(0, depth, rows[:width], num_outputs=width)])
            yield _result(depth, width, alone[:width], together)
        # Others have as many rows each, so that they are computed together.
        others = [Span(slot, 0, [text[slot]], num_outputs=1) for slot in range(1, _NUM_SLOTS)]
        beside = runtime.decode([Span(0, depth, rows[:1], num_outputs=1), *others])[0]
        yield _result(depth, 1, alone[:1], beside)
        for slot in range(_NUM_SLOTS):
            runtime.memory.trim(slot, 0)


def _result(depth: int, width: int, alone: NDArray[np.float32], together: NDArray[np.float32]) -> RowsResult:
    is_equal = np.array_equal(alone.view(np.uint32), together.view(np.uint32))
    worst = float(np.abs(alone - together).max() / np.abs(alone).max())
    return RowsResult(depth, width, worst, is_equal)


def _measure(
    path: Path, device: str | None, setting: str, environment: Mapping[str, str], _report: Callable[..., None]
) -> Exactness:
    """What the process does: llama.cpp reads the environment when it first looks for devices."""
    set_up_logs()
    os.environ.update(environment)
    try:
        found = first_device(device)
        return Exactness(setting, found.description, measure_rows(path, found.name))
    except MeshError as error:
        return Exactness(setting, device or "", (), error.message)


def measure_settings(path: Path, device: str | None, *, most_settings: int | None = None) -> list[Exactness]:
    """Measure each setting of a device's backend in a process of its own.

    Args:
        path: A whole model, a GGUF file.
        device: llama.cpp's name of the device, or None for the first one.
        most_settings: Measure no more than so many of them; None for all.
    """
    name = device or first_device().name
    found = []
    settings = list(SETTINGS.get(backend_of(name), _PLAIN).items())[:most_settings]
    for setting, environment in settings:
        try:
            found.append(call(_measure, path, name, setting, dict(environment)))
        except ProcessEnded as end:
            found.append(Exactness(setting, name, (), f"llama.cpp ends with exit code {end.exit_code}"))
    return found


@click.command()
@click.argument("model", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--device", help="llama.cpp's name of the device; the first one unless given.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(model: Path | None, device: str | None, *, as_json: bool) -> None:
    """Measure whether rows of MODEL, or of a small random one, depend on their batch on a device."""
    try:
        with tempfile.TemporaryDirectory(prefix="mesh-exactness-") as folder:
            if model is None:
                model = Path(folder) / "random.gguf"
                write_random_gguf(model, SHAPES["small"], "Q4_0")
            found = measure_settings(model, device)
    except MeshError as error:
        raise click.ClickException(error.message) from error
    if as_json:
        click.echo(json.dumps([asdict(each) | {"is_exact": each.is_exact} for each in found]))
        return
    click.echo(f"{next((each.device for each in found if each.device), device)}\n")
    click.echo(
        markdown_table(
            ("setting", "exact", "found"),
            ((each.setting, "yes" if each.is_exact else "no", each.summary) for each in found),
        )
    )


if __name__ == "__main__":
    main()
