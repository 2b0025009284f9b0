"""Tiny random models of families that read images, and llama.cpp's own computation of them."""

from __future__ import annotations

import asyncio
import ctypes
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import llama_cpp
import numpy as np

from mesh.engine import GenerationRequest, RowInput
from spanmesh_proto.image_chunk import ImageChunk
from spanmesh_proto.row_ids import FIRST_ROW_ID
from stages.runtime.row_positions import RowPositions
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.sampling.sampler import Sampler, SamplingParams
from tests.support.tiny_families import (
    HEAD,
    HEADS,
    N_EMBD,
    N_FF,
    N_STATE,
    TINY_FAMILIES,
    Metadata,
    Noise,
    Tensors,
    TinyFamily,
    attention,
    delta_net,
    dense,
    head_norms,
)
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

MROPE_SECTIONS: Final[Metadata] = {"rope.dimension_sections": [3, 3, 2, 0]}
"""Parts of positions."""


def _qwen35(noise: Noise, layer: int) -> Tensors:
    """Every third layer has attention, with a gate in the queries; the others a gated delta net."""
    tensors = {"post_attention_norm.weight": noise.vector(N_EMBD)} | dense(noise)
    if (layer + 1) % 3 == 0:
        gated = {"attn_q.weight": noise.matrix(2 * HEADS * HEAD, N_EMBD)}
        return tensors | attention(noise) | head_norms(noise) | gated
    return tensors | delta_net(noise, ("beta", "alpha"))


def _cogvlm(noise: Noise, _layer: int) -> Tensors:
    """Other weights for rows of images."""
    qkv, out = (3 * HEADS * HEAD, N_EMBD), (N_EMBD, HEADS * HEAD)
    return dense(noise) | {
        "attn_norm.weight": noise.vector(N_EMBD),
        "ffn_norm.weight": noise.vector(N_EMBD),
        "attn_output.weight": noise.matrix(*out),
        "attn_qkv.weight": noise.matrix(*qkv),
        "vis_attn_qkv.weight": noise.matrix(*qkv),
        "vis_attn_output.weight": noise.matrix(*out),
        "vis_gate.weight": noise.matrix(N_FF, N_EMBD),
        "vis_up.weight": noise.matrix(N_FF, N_EMBD),
        "vis_down.weight": noise.matrix(N_EMBD, N_FF),
    }


_GLM = TINY_FAMILIES["glm4moe"]
_ATTENTION = {key: value for key, value in TINY_FAMILIES["phi3"].metadata.items() if "sliding" not in key}
_LINEAR = {
    "full_attention_interval": 3,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": HEADS * N_STATE,
    "ssm.state_size": N_STATE,
    "ssm.time_step_rank": HEADS,
    "ssm.group_count": 1,
}
OWN_FAMILIES = {
    "qwen35": TinyFamily(
        "qwen35",
        6,
        _qwen35,
        _ATTENTION | MROPE_SECTIONS | _LINEAR,
        (1, 2, 3, 4, 5),
    ),
    "cogvlm": TinyFamily(
        "cogvlm",
        3,
        _cogvlm,
        _ATTENTION | {"attention.head_count_kv": HEADS},
        (1, 2),
    ),
    "glm4v": replace(_GLM, metadata=_GLM.metadata | MROPE_SECTIONS),
}
MROPE = {"qwen3vl", "qwen35", "glm4v"}
SEE_ALL = {"gemma3", "gemma4"}
HYBRID = {"qwen35", "falcon-h1", "granitehybrid", "nemotron_h"}
MOST_AT_ONCE = 80


def write_vision(name: str, path: Path) -> Path:
    """The model of a family; every other name is that of a `TinyModel`."""
    family = {**TINY_FAMILIES, **OWN_FAMILIES}.get(name)
    return TinyModel(name, n_layers=4).write(path) if family is None else family.write(path)


@dataclass(frozen=True)
class Part:
    """Part of a prompt."""

    tokens: tuple[int, ...] = ()
    """Token ids; none for an image."""
    rows: NDArray[np.float32] | None = None
    """Rows of an image, float32 (rows, width of the model's input)."""
    columns: int = 0
    """Columns of an image in models with M-RoPE."""
    sees_all: bool = False
    """Whether its rows see each other."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids, in images those of their content."""
        if self.rows is None:
            return self.tokens
        seed = int(np.abs(self.rows).sum() * 1e4) + 31 * self.columns
        return tuple(FIRST_ROW_ID + (seed + 7 * row) % 2**31 for row in range(len(self.rows)))


def image(
    name: str, seed: int, lines: int = 3, columns: int = 4, width: int | None = None, scale: float = 1.0
) -> Part:
    """Noise as an image of a family."""
    width = width or {"qwen3vl": 3 * N_EMBD}.get(name, N_EMBD)
    rows = np.random.default_rng(seed).normal(0, scale, (lines * columns, width)).astype(np.float32)
    return Part((), rows, columns if name in MROPE else 0, name in SEE_ALL)


def text(seed: int, count: int) -> Part:
    """Tokens."""
    return Part(tuple(int(each) for each in np.random.default_rng(seed).integers(3, 300, count)))


def chunks_of(parts: Sequence[Part]) -> tuple[ImageChunk, ...]:
    """Chunks of a prompt's images."""
    chunks, row = [], 0
    for part in parts:
        if part.rows is not None:
            chunks.append(ImageChunk(row, len(part.rows), part.columns, part.sees_all))
        row += len(part.ids)
    return tuple(chunks)


def positions_of(parts: Sequence[Part]) -> RowPositions:
    """Positions of a prompt's rows."""
    return RowPositions(chunks_of(parts))


class WholeModel:
    """A whole model, computed by calls of llama.cpp as `mtmd_helper_eval_chunks` makes them.

    Args:
        path: The model.
        options: Settings of its context.
    """

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        self._runtime = StageRuntime(path, options)
        self._context = self._runtime._context
        self._n_vocab = self._runtime.info.n_vocab
        self._position = 0

    def close(self) -> None:
        self._runtime.close()

    def logits(self, parts: Sequence[Part], answer: Sequence[int]) -> list[NDArray[np.float32]]:
        """Logits behind a prompt, which ends with text, and behind each token of an answer."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), 0, -1, -1)
        position = 0
        for part in parts:
            position = self._text(part.tokens, position) if part.rows is None else self._image(part, position)
        self._position = position
        return [self._last(), *map(self.next_logits, answer)]

    def next_logits(self, token: int) -> NDArray[np.float32]:
        """Logits behind one more token."""
        self._position = self._text((token,), self._position)
        return self._last()

    def _last(self) -> NDArray[np.float32]:
        pointer = llama_cpp.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(pointer, (self._n_vocab,)).copy()

    def _text(self, tokens: Sequence[int], position: int) -> int:
        for first in range(0, len(tokens), self._runtime.max_rows):
            part = np.array(tokens[first : first + self._runtime.max_rows], np.int32)
            places = np.arange(len(part), dtype=np.int32) + position
            self._decode(len(part), places, token=part)
            position += len(part)
        return position

    def _image(self, part: Part, position: int) -> int:
        assert part.rows is not None
        count = len(part.rows)
        size = count if part.sees_all else self._runtime.max_rows
        places = np.zeros((4, count), np.int32)
        if part.columns:
            places[0] = position
            places[1] = position + np.arange(count) // part.columns
            places[2] = position + np.arange(count) % part.columns
        else:
            places[0] = np.arange(count) + position
        if part.sees_all:
            llama_cpp.llama_set_causal_attn(self._context, False)  # noqa: FBT003
        for first in range(0, count, size):
            rows = np.ascontiguousarray(part.rows[first : first + size])
            own = places[:, first : first + size] if part.columns else places[:1, first : first + size]
            self._decode(len(rows), np.ascontiguousarray(own), embd=rows)
        if part.sees_all:
            llama_cpp.llama_set_causal_attn(self._context, True)  # noqa: FBT003
        return position + (max(part.columns, count // part.columns) if part.columns else count)

    def _decode(self, count: int, places: NDArray[np.int32], **given: NDArray[Any]) -> None:
        batch = llama_cpp.llama_batch_init(count, 0, 1)
        # Of all rows: in cogvlm llama.cpp takes the first ones for those of the last.
        wanted = np.ones(count, np.int8)
        for row in range(count):
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = wanted[row]
        kind = ctypes.POINTER(ctypes.c_int32)
        filled = llama_cpp.llama_batch(
            n_tokens=count,
            token=given["token"].ctypes.data_as(kind) if "token" in given else None,
            embd=given["embd"].ctypes.data_as(ctypes.POINTER(ctypes.c_float)) if "embd" in given else None,
            pos=places.ctypes.data_as(kind),
            n_seq_id=batch.n_seq_id,
            seq_id=batch.seq_id,
            logits=batch.logits,
        )
        assert llama_cpp.llama_decode(self._context, filled) == 0
        llama_cpp.llama_batch_free(batch)


def prompt_of(parts: Sequence[Part]) -> tuple[int, ...]:
    """Ids of a prompt."""
    return tuple(each for part in parts for each in part.ids)


class Loads:
    """Inputs of prompts, and how many rows of them were loaded."""

    def __init__(self) -> None:
        self.num_rows = 0

    def inputs(self, parts: Sequence[Part]) -> tuple[RowInput, ...]:
        images = [part.rows for part in parts if part.rows is not None]
        return tuple(self._input(chunk, rows) for chunk, rows in zip(chunks_of(parts), images, strict=True))

    def request(self, parts: Sequence[Part], num_tokens: int, sampling: SamplingParams) -> GenerationRequest:
        """A request for an answer."""
        return GenerationRequest(prompt_of(parts), num_tokens, sampling=sampling, inputs=self.inputs(parts))

    def _input(self, chunk: ImageChunk, rows: NDArray[np.float32]) -> RowInput:
        async def load() -> NDArray[np.float32]:
            await asyncio.sleep(0.001)
            self.num_rows += len(rows)
            return rows

        return RowInput(chunk, load)


def whole_answer(
    path: Path, options: RuntimeOptions, parts: Sequence[Part], num_tokens: int, sampling: SamplingParams
) -> list[int]:
    """The text that follows a prompt, drawn token by token from the whole model."""
    prompt = prompt_of(parts)
    sampler, said = Sampler(sampling, len(prompt)), list(prompt)
    with closing(WholeModel(path, options)) as whole:
        (logits,) = whole.logits(parts, ())
        while True:
            said.append(sampler.sample(logits, len(said), np.array(said)))
            if len(said) == len(prompt) + num_tokens:
                return said[len(prompt) :]
            logits = whole.next_logits(said[-1])
