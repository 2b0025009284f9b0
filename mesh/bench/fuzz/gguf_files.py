"""Model files as a bad disk, a broken download or an enemy leaves them. Pure."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from gguf.constants import GGMLQuantizationType

from mesh.bench.fuzz.damage import damaged
from stages.gguf.header import FORMATS, Value, ValueType
from stages.slicing.stage_writer import encode_header

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from stages.slicing.layout import StageLayout, StageTensor

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
