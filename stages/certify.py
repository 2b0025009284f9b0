"""Comparing a model cut in two with the same model whole: does cutting change a single bit?

Three phases, all in exact numeric mode. `prefill`: one batch of prompt rows. `decode`: one row at a time, each
the whole model's greedy choice, whatever the cut model would have chosen. `chunks`: a longer prompt in
several batches, past the model's sliding window if it has one, where a wrong window shows.

The whole model runs once; what it had at each cut is kept and compared with what the first stage hands on.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from spanmesh_proto.errors import InvalidModel, UncuttableModel
from stages.certificate import Certificate, CutResult, Difference, compare, phases_of
from stages.cutting.cut import write_stage
from stages.cutting.source_model import read_source
from stages.layers import LayerRange
from stages.runtime import RuntimeOptions, Span, StageRuntime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from stages.cutting.source_model import SourceModel

PHASES: Final = ("prefill", "decode", "chunks")
_SLOT: Final = 0
_SEED: Final = 20_240_613
_CHUNK_ROWS: Final = 60
_CHUNKS: Final = 3
# A row of logits of a large vocabulary is 1 MB: of each chunk, these last rows are compared.
_LOGIT_ROWS_PER_CHUNK: Final = 2
# Windows longer than this would take longer to fill than certifying is worth.
_LONGEST_WINDOW: Final = 2048


@dataclass(frozen=True)
class _Decode:
    """One decode of the whole model.

    Attributes:
        phase: One of `PHASES`.
        start: Position of the first row; 0 begins a new sequence.
        tokens: One a row.
        logits: float32 (rows asked for, n_vocab).
        hidden: By cut, float32 (rows, n_embd): output of the layer before it.
    """

    phase: str
    start: int
    tokens: tuple[int, ...]
    logits: NDArray[np.float32]
    hidden: dict[int, NDArray[np.float32]]

    def span(self, hidden: NDArray[np.float32] | None = None) -> Span:
        """The same rows for a stage."""
        return Span(_SLOT, self.start, self.tokens, hidden, num_outputs=len(self.logits))


def certify(
    model: Path,
    cuts: Sequence[int] | None = None,
    *,
    n_prompt: int = 48,
    n_decode: int = 24,
    num_threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Certificate:
    """Cut a model in two at each of some layers alone, and compare with the whole.

    Stage files lie in a temporary folder, those of one cut at a time.

    Args:
        model: A whole model, a GGUF file.
        cuts: First layers of the second stage, each 1 to n_layers - 1; all that are allowed if None.
        n_prompt: Rows of the prefill, at most 63.
        n_decode: Rows decoded one at a time.
        num_threads: Threads of llama.cpp.
        progress: Called with decodes done and decodes in all.

    Raises:
        InvalidModel: If llama.cpp does not load the model or a stage of it, or it computes no numbers.
        UncuttableModel: If it has no such layer, or its layers have no outputs to tap.
        ClusterError: If exact mode is out of reach in this process.
    """
    source = read_source(model)
    chosen = tuple(range(1, source.n_layers)) if cuts is None else tuple(cuts)
    for cut in chosen:
        if not 0 < cut < source.n_layers:
            raise UncuttableModel(
                f"{model.name} cannot be cut at {cut}: it has {source.n_layers} layers, "
                f"so cuts are 1 to {source.n_layers - 1}"
            )
        source.check_range(LayerRange(0, cut))
    if not chosen:
        raise UncuttableModel(f"{model.name} has {source.n_layers} layers; there is nothing to cut")
    n_chunk_rows = _num_chunk_rows(source)
    options = RuntimeOptions(
        ctx_size=max(n_prompt + n_decode, n_chunk_rows), num_threads=num_threads, exact=True
    )
    num_decodes = 1 + n_decode + len(range(0, n_chunk_rows, _CHUNK_ROWS))
    meter = _Meter(num_decodes * (1 + 2 * len(chosen)), progress)
    decodes = []
    for decode in _run_whole(model, options, chosen, (n_prompt, n_decode, n_chunk_rows)):
        decodes.append(decode)
        meter.step()
    results = tuple(_certify_cut(source, cut, decodes, options, meter) for cut in chosen)
    return Certificate(model.name, source.header.architecture, source.n_layers, results)


def _num_chunk_rows(source: SourceModel) -> int:
    architecture = source.header.architecture
    window = source.header.integer(f"{architecture}.attention.sliding_window", 0)
    n_ctx_train = source.header.integer(f"{architecture}.context_length")
    rows = _CHUNKS * _CHUNK_ROWS
    if window <= _LONGEST_WINDOW:
        rows = max(rows, window + _CHUNK_ROWS)
    return min(rows, n_ctx_train)


def _run_whole(
    model: Path, options: RuntimeOptions, cuts: tuple[int, ...], sizes: tuple[int, int, int]
) -> Iterator[_Decode]:
    n_prompt, n_decode, n_chunk_rows = sizes
    observing = RuntimeOptions(
        ctx_size=options.ctx_size,
        num_threads=options.num_threads,
        exact=True,
        observe_layers=tuple(cut - 1 for cut in cuts),
    )
    with closing(StageRuntime(model, observing)) as runtime:

        def run(phase: str, start: int, tokens: tuple[int, ...], num_outputs: int) -> _Decode:
            (logits,) = runtime.decode([Span(_SLOT, start, tokens, num_outputs=num_outputs)])
            if not np.isfinite(logits).all():
                raise InvalidModel(
                    f"{model.name} computes logits that are no numbers; there is nothing to certify"
                )
            # Rows that the runtime added come after ours.
            hidden = {cut: runtime.observed(cut - 1)[: len(tokens)] for cut in cuts}
            return _Decode(phase, start, tokens, logits, hidden)

        noise = np.random.default_rng(_SEED)
        prompt = tuple(noise.integers(runtime.info.n_vocab, size=n_prompt).tolist())
        decode = run("prefill", 0, prompt, n_prompt)
        yield decode
        for position in range(n_prompt, n_prompt + n_decode):
            decode = run("decode", position, (int(decode.logits[-1].argmax()),), 1)
            yield decode
        long_prompt = noise.integers(runtime.info.n_vocab, size=n_chunk_rows).tolist()
        for start in range(0, n_chunk_rows, _CHUNK_ROWS):
            chunk = tuple(long_prompt[start : start + _CHUNK_ROWS])
            yield run("chunks", start, chunk, min(_LOGIT_ROWS_PER_CHUNK, len(chunk)))


def _certify_cut(
    source: SourceModel, cut: int, decodes: Sequence[_Decode], options: RuntimeOptions, meter: _Meter
) -> CutResult:
    with tempfile.TemporaryDirectory(prefix="spanmesh-certify-") as folder:
        first, second = Path(folder) / "first.gguf", Path(folder) / "second.gguf"
        # Two stages made here of one source: whose hash they carry does not matter.
        write_stage(source, LayerRange(0, cut), first, "0" * 64, _ignore)
        with closing(StageRuntime(first, options)) as runtime:
            handed_on = [_step(runtime, decode.span(), meter) for decode in decodes]
        first.unlink()
        write_stage(source, LayerRange(cut, source.n_layers), second, "0" * 64, _ignore)
        with closing(StageRuntime(second, options)) as runtime:
            logits = [
                _step(runtime, decode.span(hidden), meter)
                for decode, hidden in zip(decodes, handed_on, strict=True)
            ]
    differences: list[tuple[str, Difference]] = [
        (decode.phase, compare((decode.hidden[cut], hidden), (decode.logits, row)))
        for decode, hidden, row in zip(decodes, handed_on, logits, strict=True)
    ]
    return CutResult(cut, phases_of(differences, PHASES))


def _step(runtime: StageRuntime, span: Span, meter: _Meter) -> NDArray[np.float32]:
    (result,) = runtime.decode([span])
    meter.step()
    return result


def _ignore(_n_bytes: int) -> None:
    pass


class _Meter:
    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0

    def step(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)
