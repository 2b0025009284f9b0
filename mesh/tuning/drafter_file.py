"""Weights of an EAGLE-3 drafter (Li et al. 2025): read from a GGUF as float32, and written into one.

Names and shapes are llama.cpp's (`src/models/eagle3.cpp`); arrays have the slowest dimension first, so that a
matrix maps its columns to its rows. What is not trained, such as an embedding of its own and the metadata of
the tokenizer, goes into the new file byte by byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType

from mesh.draft.tensor_checks import check_heads
from spanmesh_proto.errors import InvalidModel, UncuttableModel
from speculative.proposer import DrafterKind
from stages.files import atomic_write
from stages.gguf import Value, ValueType
from stages.slicing.layout import StageLayout, StageTensor
from stages.slicing.stage_writer import encode_header, padded
from stages.slicing.tensor_names import EMBEDDING, OUTPUT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from mesh.draft.drafter import Drafter
    from stages.gguf import GgufHeader, TensorInfo

TUNED_PREFIX: Final = "spanmesh.tuned."
"""Prefix of metadata about tuning, which llama.cpp ignores."""
FEATURE_NORM: Final = "enc.output_norm.weight"
"""Norm of the joined features, in drafters that have one."""
TRAINED: Final = (
    "fc.weight",
    "output_norm.weight",
    "blk.0.attn_norm.weight",
    "blk.0.attn_norm_2.weight",
    "blk.0.attn_q.weight",
    "blk.0.attn_k.weight",
    "blk.0.attn_v.weight",
    "blk.0.attn_output.weight",
    "blk.0.ffn_norm.weight",
    "blk.0.ffn_gate.weight",
    "blk.0.ffn_up.weight",
    "blk.0.ffn_down.weight",
)
"""Tensors that are trained, besides `FEATURE_NORM`. Embedding and head stay: the head's rows are the
target's."""
_OWN_TOKENS: Final = "d2t"
_ROPE_FACTORS: Final = "rope_freqs.weight"
_Q8: Final = GGMLQuantizationType.Q8_0
_Q8_BLOCK: Final = 32
_ALIGNMENT: Final = 32
# Relative difference of rows of a head that was quantised to four bits: .08 in the demo's drafter.
_SAME_HEAD: Final = 0.25
_NUM_COMPARED: Final = 256


@dataclass(frozen=True)
class Eagle3Shape:
    """Sizes and switches of a drafter."""

    n_embd: int
    """Width of its own state."""
    n_heads: int
    n_heads_kv: int
    head_width: int
    n_rot: int
    """Values of a head that are rotated, in neighbouring pairs."""
    rope_base: float
    rope_scale: float
    """Factor of positions."""
    norm_eps: float
    norm_before_fc: bool
    norm_before_residual: bool


@dataclass(frozen=True, eq=False)
class Eagle3Weights:
    """A drafter as numbers."""

    shape: Eagle3Shape
    trained: Mapping[str, NDArray[np.float32]]
    """By the names of `TRAINED`, and `FEATURE_NORM` where it has one."""
    head: NDArray[np.float32]
    """[own tokens, n_embd]: logits of a state, which `output_norm` has scaled."""
    token_ids: NDArray[np.int64]
    """[own tokens]: the model's id of each token that can be drafted."""
    rope_factors: NDArray[np.float32] | None
    """[n_rot / 2]: divisors of the rotations' frequencies."""


class TensorRows:
    """Rows of a matrix in a file, turned into numbers where they are asked for.

    Args:
        header: Of the file.
        tensor: One of its tensors; a vector is a matrix of one row.

    Raises:
        InvalidModel: If the file cannot be read, or if numbers of this type are unknown.
    """

    def __init__(self, header: GgufHeader, tensor: TensorInfo) -> None:
        self._type = tensor.type
        path = header.paths[tensor.file]
        num_rows = math.prod(tensor.shape[1:])
        try:
            self._bytes: NDArray[np.uint8] = np.memmap(
                path,
                np.uint8,
                mode="r",
                offset=tensor.offset_bytes,
                shape=(num_rows, tensor.n_bytes // num_rows),
            )
            self.rows(np.arange(1))
        except (OSError, ValueError) as error:
            raise InvalidModel(f"{path} cannot be read: {error}") from error
        except NotImplementedError as error:
            raise InvalidModel(
                f"{path.name}: tensor {tensor.name} is of type {tensor.type.name}, which cannot be turned "
                "into numbers: take the file in another quantisation"
            ) from error

    def __len__(self) -> int:
        return len(self._bytes)

    def rows(self, ids: NDArray[np.integer[Any]] | None = None) -> NDArray[np.float32]:
        """Rows by their indices, float32; all of them unless given."""
        stored = np.ascontiguousarray(self._bytes if ids is None else self._bytes[ids])
        found: NDArray[np.float32] = quants.dequantize(stored, self._type)
        return np.array(found, np.float32)


def require_trainable(drafter: Drafter) -> None:
    """Check that a drafter is of a kind that can be trained.

    Raises:
        UncuttableModel: If it is not.
    """
    if drafter.kind is not DrafterKind.EAGLE3:
        raise UncuttableModel(
            f"{drafter.path.name} is of kind {drafter.kind.label}: EAGLE-3 drafters alone can be tuned"
        )
    header = drafter.header
    scaling = header.text("eagle3.rope.scaling.type", "none")
    if scaling not in {"none", "linear"}:
        raise UncuttableModel(
            f"{drafter.path.name} scales positions by {scaling}, which training does not compute: name "
            "another drafter"
        )


def read_weights(drafter: Drafter, target: GgufHeader) -> Eagle3Weights:
    """A drafter as float32.

    Args:
        drafter: An EAGLE-3 drafter that fits the model.
        target: Header of the model's file.

    Raises:
        InvalidModel: If a file cannot be read, or has weights of an unknown type.
        UncuttableModel: If it cannot be trained.
    """
    require_trainable(drafter)
    header = drafter.header
    shape = _shape(header)
    names = (*TRAINED, FEATURE_NORM) if shape.norm_before_fc else TRAINED
    trained = {}
    for name in names:
        if (tensor := header.tensors.get(name)) is None:
            raise InvalidModel(f"{header.path.name}: tensor {name} is missing; convert the drafter again")
        rows = TensorRows(header, tensor).rows()
        trained[name] = rows[0] if len(tensor.shape) == 1 else rows
    factors = header.tensors.get(_ROPE_FACTORS)
    head = head_rows(header) if OUTPUT in header.tensors else head_rows(target)
    return Eagle3Weights(
        shape=shape,
        trained=trained,
        head=head.rows(),
        token_ids=_token_ids(header, len(head)),
        rope_factors=None if factors is None else TensorRows(header, factors).rows()[0],
    )


def head_rows(header: GgufHeader) -> TensorRows:
    """Rows of a head, which may be the embedding as well.

    Raises:
        InvalidModel: See `TensorRows`.
    """
    return TensorRows(header, header.tensors.get(OUTPUT) or header.tensors[EMBEDDING])


def embedding_rows(drafter: Drafter, target: GgufHeader) -> TensorRows:
    """Rows of the embedding that a drafter reads: its own, or the model's.

    Raises:
        InvalidModel: See `TensorRows`.
    """
    header = drafter.header if EMBEDDING in drafter.header.tensors else target
    return TensorRows(header, header.tensors[EMBEDDING])


def has_head_of(weights: Eagle3Weights, target_head: TensorRows, n_embd: int) -> bool:
    """Whether rows of a drafter's head are the target's, quantisation apart: only then others can be added.

    Args:
        weights: The drafter.
        target_head: The target's head.
        n_embd: Width of the target.
    """
    if weights.shape.n_embd != n_embd:
        return False
    step = max(1, len(weights.head) // _NUM_COMPARED)
    own, other = weights.head[::step], target_head.rows(weights.token_ids[::step])
    scale = np.linalg.norm(other, axis=1) + np.finfo(np.float32).tiny
    return bool(np.median(np.linalg.norm(own - other, axis=1) / scale) < _SAME_HEAD)


def tuned_values(header: GgufHeader) -> Mapping[str, Value]:
    """What an earlier tuning has written into a drafter's metadata, by name without the prefix."""
    return {
        key.removeprefix(TUNED_PREFIX): value
        for key, value in header.metadata.items()
        if key.startswith(TUNED_PREFIX)
    }


def write_weights(path: Path, drafter: Drafter, weights: Eagle3Weights, tuned: Mapping[str, Value]) -> None:
    """Write a drafter like another one with other weights, matrices in Q8_0.

    The file appears whole, and only this user can read it: texts may have left traces in the weights.

    Args:
        path: Where to.
        drafter: The drafter that it was made of.
        weights: Its weights.
        tuned: What is said of the tuning, by name.

    Raises:
        ModelError: If the file cannot be written.
        InvalidModel: If the drafter's file cannot be read.
    """
    header = drafter.header
    kept = {
        key: value for key, value in header.metadata.items() if not key.startswith((TUNED_PREFIX, "split."))
    }
    metadata = kept | {TUNED_PREFIX + name: value for name, value in tuned.items()}
    arrays: dict[str, NDArray[Any]] = dict(weights.trained)
    if not _is_as_before(header, weights):
        arrays |= {OUTPUT: weights.head, _OWN_TOKENS: weights.token_ids}
    parts = [_encoded(name, array) for name, array in arrays.items()]
    parts += [_copied(header, tensor) for name, tensor in header.tensors.items() if name not in arrays]
    _write(path, header.alignment, metadata, parts, is_private=True)


def write_new(path: Path, weights: Eagle3Weights, metadata: Mapping[str, Value]) -> None:
    """Write a drafter that lacks an embedding, matrices in Q8_0; the file appears whole.

    Args:
        path: Where to.
        weights: Its weights.
        metadata: All of it: sizes, layers and tokenizer.

    Raises:
        ModelError: If the file cannot be written.
    """
    arrays: dict[str, NDArray[Any]] = {
        **weights.trained,
        OUTPUT: weights.head,
        _OWN_TOKENS: weights.token_ids,
    }
    _write(path, _ALIGNMENT, metadata, [_encoded(name, array) for name, array in arrays.items()])


def _write(
    path: Path,
    alignment: int,
    metadata: Mapping[str, Value],
    parts: Sequence[tuple[StageTensor, NDArray[Any]]],
    *,
    is_private: bool = False,
) -> None:
    layout = StageLayout(alignment, metadata, tuple(tensor for tensor, _ in parts))
    with atomic_write(path, is_private=is_private) as file:
        file.write(encode_header(layout))
        for tensor, data in parts:
            file.write(data.tobytes())
            file.write(bytes(padded(tensor.n_bytes, alignment) - tensor.n_bytes))


def _is_as_before(header: GgufHeader, weights: Eagle3Weights) -> bool:
    """Whether a drafter drafts the tokens that its file had, in their order: then its head stays as it is."""
    return np.array_equal(_token_ids(header, len(weights.token_ids)), weights.token_ids)


def _shape(header: GgufHeader) -> Eagle3Shape:
    n_embd = header.integer("eagle3.embedding_length")
    heads, heads_kv, head = check_heads(header, n_embd)
    return Eagle3Shape(
        n_embd=n_embd,
        n_heads=heads,
        n_heads_kv=heads_kv,
        head_width=head,
        n_rot=header.integer("eagle3.rope.dimension_count", head),
        rope_base=header.number("eagle3.rope.freq_base", 10_000.0),
        rope_scale=1.0 / header.number("eagle3.rope.scaling.factor", 1.0),
        norm_eps=header.number("eagle3.attention.layer_norm_rms_epsilon", 0.0),
        norm_before_fc=_flag(header, "eagle3.norm_before_fc"),
        norm_before_residual=_flag(header, "eagle3.norm_before_residual"),
    )


def _flag(header: GgufHeader, key: str) -> bool:
    value = header.metadata.get(key)
    return value is not None and value.type is ValueType.BOOL and value.decode() is True


def _token_ids(header: GgufHeader, num_rows: int) -> NDArray[np.int64]:
    if _OWN_TOKENS not in header.tensors:
        return np.arange(num_rows, dtype=np.int64)
    return _own_tokens(header)


def _own_tokens(header: GgufHeader) -> NDArray[np.int64]:
    tensor = header.tensors[_OWN_TOKENS]
    _, data = _copied(header, tensor)
    return np.array(data.view("<i8"), np.int64)


def _copied(header: GgufHeader, tensor: TensorInfo) -> tuple[StageTensor, NDArray[np.uint8]]:
    path = header.paths[tensor.file]
    try:
        data = np.fromfile(path, np.uint8, tensor.n_bytes, offset=tensor.offset_bytes)
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) != tensor.n_bytes:
        raise InvalidModel(f"{path} ended inside tensor {tensor.name!r}; fetch it again")
    return StageTensor(tensor.name, tensor.shape, tensor.type, tensor.n_bytes, None), data


def _encoded(name: str, array: NDArray[Any]) -> tuple[StageTensor, NDArray[Any]]:
    kind, data = GGMLQuantizationType.F32, array
    if array.dtype == np.int64:
        kind = GGMLQuantizationType.I64
    elif array.ndim > 1:
        # Blocks do not cross rows.
        kind = _Q8 if array.shape[-1] % _Q8_BLOCK == 0 else GGMLQuantizationType.F16
        data = quants.quantize(array, kind)
    return StageTensor(name, tuple(reversed(array.shape)), kind, data.nbytes, None), data
