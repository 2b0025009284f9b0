"""Parity of devices: stages against the whole model, and a device against the processor.

    python -m tests.qualification.device_parity MODEL.gguf…

The whole model continues a random prompt greedily on the device. The same tokens are then computed in other
ways: by the model cut at as many places as possible, by device and processor with half of the layers each,
and by the processor. Compared are the tokens that each would have chosen, and their distributions.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import numpy as np

from mesh.util.logs import set_up_logs
from meshbench.experiment import experiment
from meshbench.report_tools import Report, Section, list_section, markdown_table
from meshbench.shared_options import json_option
from spanmesh_proto.errors import ClusterError, MeshError, UncuttableModel
from stages.certification.certify import cut_stage
from stages.certification.comparison import wire_loss
from stages.isolated import ProcessEnded, call
from stages.layers import LayerRange
from stages.runtime.devices import layer_devices
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.source_model import read_source
from stages.transport.hidden_codec import HiddenType

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from stages.runtime.devices import Device
    from stages.slicing.source_model import SourceModel

    Logits: TypeAlias = NDArray[np.float32]

_NUM_PROMPT: Final = 48
NUM_TOKENS: Final = 96
_SEED: Final = 4


@dataclass(frozen=True)
class Bounds:
    """Bounds of a parity."""

    least_share: float
    """Least share of tokens that agree."""
    most_kl_nats: float
    """Most mean divergence of a token, in nats."""


STAGES: Final = Bounds(0.95, 0.005)
"""Bounds of a model cut into stages: what a cut changes is rounding."""
PROCESSOR: Final = Bounds(0.9, 0.02)
"""Bounds of a device beside the processor: their kernels round in other orders and formats."""


@dataclass(frozen=True)
class Parity:
    """Comparison of two ways to compute the same tokens."""

    num_tokens: int
    """Tokens compared."""
    num_agreed: int
    """Tokens of which both have the same largest logit."""
    mean_kl_nats: float
    """Mean Kullback-Leibler divergence of a token."""
    is_bit_equal: bool
    """Whether all logits are equal to the last bit."""

    def is_within(self, bounds: Bounds) -> bool:
        """Whether both bounds hold."""
        is_close = self.mean_kl_nats <= bounds.most_kl_nats
        return is_close and self.num_agreed >= bounds.least_share * self.num_tokens

    def __str__(self) -> str:
        equal = ", bit-equal" if self.is_bit_equal else ""
        return f"{self.num_agreed}/{self.num_tokens}, {self.mean_kl_nats:.6f}{equal}"


def compare(ours: Logits, theirs: Logits) -> Parity:
    """Compare logits of the same tokens.

    Args:
        ours: float32 (tokens, n_vocab).
        theirs: The same, computed otherwise.
    """
    loss = wire_loss(HiddenType.F32, ours, theirs)
    return Parity(
        loss.n_tokens,
        loss.n_tokens - loss.n_changed_tokens,
        loss.mean_kl_nats,
        bool(np.array_equal(ours, theirs)),
    )


def follow(
    stages: Sequence[StageRuntime],
    prompt: Sequence[int],
    num_tokens: int,
    tokens: Sequence[int] | None = None,
) -> tuple[list[int], Logits]:
    """Continue a prompt by one token after the other.

    Args:
        stages: Stages of a model in order; their slot 0 is used from its start.
        prompt: Token ids.
        num_tokens: Tokens to choose.
        tokens: Continue with these instead of those chosen.

    Returns:
        The tokens with the largest logits, and the logits, float32 (num_tokens, n_vocab).
    """
    rows: list[Logits] = []
    chosen: list[int] = []
    position, fed = 0, list(prompt)
    for step in range(num_tokens):
        hidden = None
        for stage in stages:
            (hidden,) = stage.decode([Span(0, position, fed, hidden, int(stage.info.is_tail))])
        assert hidden is not None
        rows.append(hidden[-1])
        chosen.append(int(hidden[-1].argmax()))
        position += len(fed)
        fed = [chosen[-1] if tokens is None else tokens[step]]
    return chosen, np.array(rows)


@dataclass(frozen=True)
class ModelParity:
    """Parities of one model on one device, each beside the whole model there."""

    model: str
    """Name of the file."""
    architecture: str
    """`general.architecture`."""
    device: str
    """Description of the device."""
    cuts: tuple[int, ...]
    """Layers where the stages begin, 0 left out."""
    stages: Parity
    """Of the stages, all on the device."""
    split: Parity
    """Of the model with half of its layers on the processor."""
    processor: Parity
    """Of the processor alone."""

    @property
    def is_within(self) -> bool:
        """Whether all bounds hold."""
        others = self.split, self.processor
        return self.stages.is_within(STAGES) and all(each.is_within(PROCESSOR) for each in others)


def measure(
    path: Path,
    device: Device,
    folder: Path,
    *,
    cuts: Sequence[int] | None = None,
    num_tokens: int = NUM_TOKENS,
    num_threads: int = 1,
) -> ModelParity:
    """Compute a model in all ways.

    Args:
        path: A whole model, a GGUF file.
        device: A device of this process.
        folder: Where stage files are written.
        cuts: Layers where stages begin; as many as are possible unless given.
        num_tokens: Tokens to compare.
        num_threads: Threads of the processor.

    Raises:
        MeshError: If it cannot be cut or computed.
    """
    source = read_source(path)
    n_layers = source.n_layers
    edges = (0, *(_all_cuts(source) if cuts is None else cuts), n_layers)
    whole = {device.name: n_layers}

    def options(gpu_layers: dict[str, int]) -> RuntimeOptions:
        ctx_size = _NUM_PROMPT + num_tokens
        return RuntimeOptions(
            ctx_size=ctx_size, num_threads=num_threads, gpu_layers=tuple(gpu_layers.items())
        )

    with closing(StageRuntime(path, options(whole))) as runtime:
        prompt = random_prompt(runtime.info.n_vocab)
        tokens, logits = follow([runtime], prompt, num_tokens)

    def parity_of(*files: tuple[Path, dict[str, int]]) -> Parity:
        with ExitStack() as stack:
            stages = [
                stack.enter_context(closing(StageRuntime(file, options(gpu_layers))))
                for file, gpu_layers in files
            ]
            return compare(logits, follow(stages, prompt, num_tokens, tokens)[1])

    parts = []
    for index, (start, stop) in enumerate(pairwise(edges)):
        file = folder / f"stage-{index}.gguf"
        cut_stage(path, LayerRange(start, stop), file)
        parts.append((file, {device.name: stop - start}))
    half = {device.name: max(1, n_layers // 2)}
    return ModelParity(
        path.name,
        source.header.architecture,
        device.description,
        edges[1:-1],
        stages=parity_of(*parts),
        split=parity_of((path, half)),
        processor=parity_of((path, {})),
    )


def random_prompt(n_vocab: int, num_tokens: int = _NUM_PROMPT) -> list[int]:
    """Token ids, the same each time; those at the start, which may be special, left out."""
    return [
        int(token)
        for token in np.random.default_rng(_SEED).integers(min(100, n_vocab // 4), n_vocab, num_tokens)
    ]


def _all_cuts(source: SourceModel) -> tuple[int, ...]:
    """As many cuts as stages may have between them, taken from the first layer on."""
    cuts: list[int] = []
    for cut in source.allowed_cuts:
        if _may_be_stage(source, LayerRange(cuts[-1] if cuts else 0, cut)):
            cuts.append(cut)
    while cuts and not _may_be_stage(source, LayerRange(cuts[-1], source.n_layers)):
        cuts.pop()
    return tuple(cuts)


def _may_be_stage(source: SourceModel, layers: LayerRange) -> bool:
    try:
        source.check_range(layers)
    except UncuttableModel:
        return False
    return True


def first_device(name: str | None = None) -> Device:
    """The device with a name, or the first that llama.cpp puts layers on.

    Raises:
        ClusterError: If there is none.
    """
    devices = layer_devices()
    found = next((device for device in devices if name in {None, device.name}), None)
    if found is None:
        known = ", ".join(device.name for device in devices) or "none"
        raise ClusterError(f"llama.cpp finds no device {name or 'for layers'} here; it finds {known}")
    return found


def _measure(path: Path, device: str | None, num_tokens: int, _report: Callable[..., None]) -> ModelParity:
    """What the process does."""
    set_up_logs()
    with tempfile.TemporaryDirectory(prefix="mesh-parity-") as folder:
        return measure(path, first_device(device), Path(folder), num_tokens=num_tokens)


def table(found: Sequence[ModelParity]) -> str:
    """A line for each model, in Markdown."""
    heads = (
        "model",
        "architecture",
        "stages",
        "stages and whole",
        "half on the processor",
        "processor",
        "bounds",
    )
    return markdown_table(
        heads,
        (
            (
                each.model,
                each.architecture,
                str(len(each.cuts) + 1),
                str(each.stages),
                str(each.split),
                str(each.processor),
                "within" if each.is_within else "BEYOND",
            )
            for each in found
        ),
    )


@click.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--device", help="llama.cpp's name of the device; the first one unless given.")
@click.option("--tokens", default=NUM_TOKENS, show_default=True, type=click.IntRange(8, 2048))
@json_option
@experiment
def main(models: tuple[Path, ...], device: str | None, tokens: int) -> Report:
    """Compare MODELS in stages and whole, on a GPU and on the processor; 1 if any is beyond the bounds."""
    found: list[ModelParity] = []
    failures: dict[str, str] = {}
    for path in models:
        # A process each: llama.cpp may abort.
        try:
            found.append(call(_measure, path, device, tokens))
        except ProcessEnded as end:
            failures[path.name] = f"llama.cpp ends its process with exit code {end.exit_code}"
        except MeshError as error:
            failures[path.name] = error.message
    told = f"{found[0].device}; tokens that agree, and mean KL divergence in nats" if found else ""
    ended = [f"{name}: {reason}" for name, reason in failures.items()]
    return Report(
        title="Parity of devices",
        sections=[
            Section("", told, told),
            Section("", table(found), table(found)),
            list_section("## Not measured", "not measured", ended),
        ],
        fields={"models": found, "failures": failures},
        is_good=not failures and all(each.is_within for each in found),
    )


if __name__ == "__main__":
    main()
