"""Fuzzing with damaged model files."""

from __future__ import annotations

import itertools
import math
import struct
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

from gguf.constants import GGMLQuantizationType

from mesh.text.tokenizer import Tokenizer
from stages.certification.certify import cut_stage
from stages.files import ModelFile, atomic_write
from stages.gguf import FORMATS, Value, ValueType, read_header
from stages.layers import LayerRange
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.layout import lay_out
from stages.slicing.model_facts import read_model_facts
from stages.slicing.source_model import read_source
from stages.slicing.stage_writer import StageWriter, encode_header
from stages.slicing.tensor_names import EMBEDDING, OUTPUT, OUTPUT_BIAS
from tests.qualification.fuzz.isolated_trial import judge, run_trial, trials
from tests.qualification.fuzz.mutations import damaged
from tests.qualification.fuzz.report import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import ForkServerContext

    from stages.slicing.layout import StageLayout, StageTensor
    from tests.qualification.fuzz.isolated_trial import Trial
    from tests.qualification.fuzz.report import FuzzOptions, FuzzReport

_ODD_EXTENTS: Final = (0, 1, 7, 2**31 - 1, 2**32, 2**63 - 1, 2**64 - 1)
_ODD_TEXTS: Final = ("", "llama", "qwen3", "gemma3", "no such thing", "nul\0l", "x" * 10_000, "\ufffd", "-1")
_ODD_NAMES: Final = (
    "",
    "blk.0.attn_q.weight",
    "blk.999999999.attn_q.weight",
    "blk." + "9" * 5000 + ".attn_q.weight",
    "blk.-1.attn_q.weight",
    "enc.blk.0.attn_q.weight",
    "nul\0l",
    "x" * 1000,
)
# Of lists that are damaged as such, those that get other entries instead of another length.
_ODD_LISTS: Final = 0.5
_ODD_ENTRIES: Final = (
    (ValueType.STRING, struct.pack("<Q", 1) + b"x"),
    (ValueType.FLOAT32, struct.pack("<f", math.nan)),
    (ValueType.FLOAT32, struct.pack("<f", math.inf)),
    (ValueType.UINT64, struct.pack("<Q", 2**64 - 1)),
)
# Far more than the good file takes, far less than what a lying count asks for.
_MEMORY_BYTES: Final = 4 * 2**30
_NUM_LAYERS: Final = 2
_NUM_TOKENS: Final = 1024


def hostile_files(good: bytes, layout: StageLayout, random: Random) -> Iterator[bytes]:
    """Without end: the file with its header damaged or lying, its data damaged, or its end missing.

    Args:
        good: The whole file.
        layout: What is in it.
        random: Decides.
    """
    header_bytes = len(encode_header(layout))
    header, body = good[:header_bytes], good[header_bytes:]
    while True:
        match random.randrange(10):
            case 0 | 1:
                yield good[: random.choice((random.randrange(header_bytes), random.randrange(len(good))))]
            case 2 | 3 | 4:
                yield _damaged_somewhere(header, random) + body
            case 5:
                yield header + _damaged_somewhere(body, random)
            case _:
                yield encode_header(_lying(layout, random)) + body


def _damaged_somewhere(data: bytes, random: Random) -> bytes:
    """Damage within a stretch: its front as often as all the rest, since counts and types are there."""
    stop = random.choice((64, 2048, len(data)))
    start = random.randrange(0, max(len(data) - stop, 0) + 1, 1) if random.random() < 0.5 else 0
    return data[:start] + damaged(data[start : start + stop], random) + data[start + stop :]


def _lying(layout: StageLayout, random: Random) -> StageLayout:
    """The same with one to three entries of the metadata, or one tensor's, saying something else."""
    if random.random() < 0.4:
        tensors = list(layout.tensors)
        at = random.randrange(len(tensors))
        tensors[at] = _lying_tensor(tensors[at], random)
        return replace(layout, tensors=tuple(tensors))
    metadata = dict(layout.metadata)
    # What describes the model says more than what describes its tokens.
    keys = [key for key in metadata if not key.startswith("tokenizer.")]
    for _ in range(random.randint(1, 3)):
        key = random.choice(random.choice((keys, list(metadata))))
        if random.random() < 0.1:
            metadata.pop(key, None)
        elif key in metadata:
            metadata[key] = _lying_value(metadata[key], random)
    return replace(layout, metadata=metadata)


def _lying_tensor(tensor: StageTensor, random: Random) -> StageTensor:
    match random.randrange(3):
        case 0:
            extents = list(tensor.shape)
            extents[random.randrange(len(extents))] = random.choice(_ODD_EXTENTS)
            return replace(tensor, shape=tuple(extents))
        case 1:
            return replace(tensor, type=random.choice(list(GGMLQuantizationType)))
        case _:
            return replace(tensor, name=random.choice(_ODD_NAMES))


def _lying_value(value: Value, random: Random) -> Value:
    """Another value of the same type, or of another, or with a count that is not true."""
    if value.type is ValueType.STRING and value.count is None:
        text = random.choice(_ODD_TEXTS).encode()
        return Value(ValueType.STRING, None, struct.pack("<Q", len(text)) + text)
    match random.randrange(3):
        case 0 if value.count is not None and random.random() < _ODD_LISTS:
            kind, odd = random.choice(_ODD_ENTRIES)
            return Value(kind, value.count, odd * value.count)
        case 0 if value.count is not None:
            return replace(value, count=random.choice((0, 1, value.count - 1, value.count + 1, 2**63)))
        case 1:
            kind = random.choice([kind for kind in FORMATS if kind is not ValueType.BOOL])
            return Value(kind, None, random.randbytes(struct.calcsize("<" + FORMATS[kind])))
        case _:
            width = len(value.payload) if value.count is None else 8
            number = random.choice((0, 1, -1, 2 ** (8 * width - 1) - 1, -(2 ** (8 * width - 1)), 3, 100_000))
            return Value(value.type, value.count, _fitted(number, width) + value.payload[width:])


def _fitted(number: int, width: int) -> bytes:
    return (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")


def try_model(context: ForkServerContext, path: Path, folder: Path) -> Trial:
    """Read, cut and load a file, and compute a few rows with its first layer.

    Args:
        context: From `trials`.
        path: The file.
        folder: For the stage file.
    """
    return run_trial(context, _attempt, (path, folder), memory_bytes=_MEMORY_BYTES)


def _attempt(begin: Callable[[str], None], path: Path, folder: Path) -> None:
    begin("reading")
    read_model_facts(path)
    begin("vocabulary")
    Tokenizer(path)
    begin("cutting")
    stage = folder / "stage.gguf"
    cut_stage(path, LayerRange(0, 1), stage)
    begin("loading")
    runtime = StageRuntime(stage, RuntimeOptions(ctx_size=64))
    runtime.decode([Span(0, 0, [1, 2, 3], num_outputs=1 if runtime.info.is_tail else 0)])
    runtime.close()


def small_layout(source: Path, *, num_layers: int, num_tokens: int) -> StageLayout:
    """A model that has only the first layers and tokens of another. What it says is nonsense.

    Args:
        source: A GGUF file, whole.
        num_layers: How many layers to keep.
        num_tokens: How many tokens and merges of the vocabulary to keep.

    Raises:
        ModelError: If the source is no such file.
    """
    model = read_source(source)
    layers = LayerRange(0, min(num_layers, model.n_layers))
    layout = lay_out(model, layers)
    metadata = {key: value for key, value in layout.metadata.items() if not key.startswith("spanmesh.")}
    for key, value in model.header.metadata.items():
        if key.startswith("tokenizer."):
            metadata[key] = first_of(value, num_tokens)
    metadata[f"{model.header.architecture}.vocab_size"] = Value.of(ValueType.UINT32, num_tokens)
    tensors = tuple(with_rows(tensor, num_tokens) for tensor in layout.tensors)
    return replace(layout, metadata=metadata, tensors=tensors)


def write_layout(source: Path, layout: StageLayout, output: Path) -> None:
    """Write such a model.

    Raises:
        ModelError: If that cannot be done.
    """
    with ModelFile(*read_header(source).paths) as reader, atomic_write(output) as file:
        StageWriter(reader, file, lambda _count: None).write(layout)


def first_of(value: Value, count: int) -> Value:
    """The first entries of an array; a scalar, or a short array, as it is."""
    if value.count is None or value.count <= count:
        return value
    if value.type is not ValueType.STRING:
        return value.cut(0, count)
    end = 0
    for _ in range(count):
        end += 8 + struct.unpack_from("<Q", value.payload, end)[0]
    return Value(value.type, count, value.payload[:end])


def with_rows(tensor: StageTensor, num_rows: int) -> StageTensor:
    """A tensor that has one row for each token, with fewer of them."""
    if tensor.name not in (EMBEDDING, OUTPUT, OUTPUT_BIAS):
        return tensor
    num_bytes = tensor.n_bytes // tensor.shape[-1] * num_rows
    return replace(tensor, shape=(*tensor.shape[:-1], num_rows), n_bytes=num_bytes)


def fuzz_ggufs(options: FuzzOptions) -> FuzzReport:
    """Whatever a file says, it loads or is refused with one of our errors.

    llama.cpp may abort on a file that got past our own checks: its process is the stage's, or one made for
    the purpose, and its end is told in one line. That is counted apart, and is no failure.

    Args:
        options: What the user says; files are made from the first layers of its model.
    """
    tally = Tally("gguf", options, time.monotonic)
    # Not for secrets: the same seed must make the same files.
    random = Random(options.seed)
    context = trials()
    layout = small_layout(options.model, num_layers=_NUM_LAYERS, num_tokens=_NUM_TOKENS)
    with tempfile.TemporaryDirectory(prefix="spanmesh-fuzz-") as name:
        folder = Path(name)
        path = folder / "model.gguf"
        write_layout(options.model, layout, path)
        good = path.read_bytes()
        for data in itertools.islice(hostile_files(good, layout, random), options.num_cases):
            path.write_bytes(data)
            judge(tally, try_model(context, path, folder), data)
    return tally.report()
