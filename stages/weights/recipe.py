"""Recipe of a stage file: its header and its hashed pieces.

A host with the recipe can make the file from any source of the pieces: another stage in its cache, its own
copy of the model, the head, the hub. The hash of the recipe is the stage's name: it determines every byte of
the file.

As text it is JSON::

    {"version": 1, "model": "SmolLM2", "layers": [10, 20, 30], "alignment": 32, "header": "<base64>",
     "tensors": [["blk.10.attn_q.weight", 207360, [0, 31104000], ["<sha256>", …]], [null, 4608], …]}

The tensors are in the order of the stage file, each with its name in the model, its size, its place in the
model (`Region`: file, start and, if its parts lie apart, bytes per row and distance of rows), and a hash for
every `PIECE_BYTES` of it; entries without a name are zeros.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from spanmesh_proto.errors import InvalidModel
from stages.files import Region
from stages.layers import LayerRange

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_BYTES: Final = 16 * 1024 * 1024
"""Of one tensor, under one hash: what must be fetched again if a byte of it is wrong."""

_VERSION: Final = 1
_NOWHERE: Final = Region(0, 0, 0)


@dataclass(frozen=True)
class Piece:
    """A part of a tensor in a stage file."""

    sha256: str
    """Hash of its bytes, hex."""
    at: int
    """Its first byte in the stage file."""
    num_bytes: int
    """Its size."""
    tensor: str
    """The tensor's name in the model."""
    tensor_bytes: int
    """Size of the whole tensor."""
    tensor_offset: int
    """Its first byte in the tensor."""
    region: Region
    """Place of the tensor's bytes in the model."""

    @property
    def file_offset(self) -> int:
        """Its first byte in the model's file."""
        return next(self.region.stretches(self.tensor_offset, 1))[0]


@dataclass(frozen=True)
class RecipeTensor:
    """A tensor of a stage file."""

    num_bytes: int
    """Size without padding."""
    name: str | None = None
    """Name in the model; None for zeros."""
    region: Region = _NOWHERE
    """Place of its bytes in the model; None for zeros."""
    hashes: tuple[str, ...] = ()
    """sha256 of each `PIECE_BYTES` of it, hex."""


@dataclass(frozen=True)
class Recipe:
    """Content of a stage file."""

    model: str
    """Name of the model, for display."""
    layers: LayerRange
    """Layers of the stage."""
    n_layers: int
    """Layers of the whole model."""
    alignment: int
    """Alignment of its tensors."""
    header: bytes
    """Its first bytes."""
    tensors: tuple[RecipeTensor, ...]
    """Its tensors in order, each padded to the alignment."""

    @cached_property
    def sha256(self) -> str:
        """The name of the stage, hex."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Every piece, in the order of the file."""
        return tuple(self._pieces())

    @cached_property
    def size_bytes(self) -> int:
        """Size of the stage file."""
        return len(self.header) + sum(self._padded(tensor.num_bytes) for tensor in self.tensors)

    @cached_property
    def weight_bytes(self) -> int:
        """Size of all pieces."""
        return sum(piece.num_bytes for piece in self.pieces)

    def zeros(self) -> Iterator[tuple[int, int]]:
        """Ranges of zeros in the file: first byte and last byte plus one, in order."""
        at = len(self.header)
        for tensor in self.tensors:
            start = at if tensor.name is None else at + tensor.num_bytes
            at += self._padded(tensor.num_bytes)
            if start < at:
                yield start, at

    def _pieces(self) -> Iterator[Piece]:
        at = len(self.header)
        for tensor in self.tensors:
            for index, sha256 in enumerate(tensor.hashes):
                offset = index * PIECE_BYTES
                yield Piece(
                    sha256,
                    at + offset,
                    min(PIECE_BYTES, tensor.num_bytes - offset),
                    tensor.name or "",
                    tensor.num_bytes,
                    offset,
                    tensor.region,
                )
            at += self._padded(tensor.num_bytes)

    def _padded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.alignment) * self.alignment

    def to_bytes(self) -> bytes:
        """The recipe as text; equal recipes have equal texts."""
        tensors: list[list[Any]] = [
            [None, tensor.num_bytes]
            if tensor.name is None
            else [tensor.name, tensor.num_bytes, _place(tensor.region), list(tensor.hashes)]
            for tensor in self.tensors
        ]
        return json.dumps(
            {
                "version": _VERSION,
                "model": self.model,
                "layers": [self.layers.start, self.layers.stop, self.n_layers],
                "alignment": self.alignment,
                "header": base64.b64encode(self.header).decode(),
                "tensors": tensors,
            },
            separators=(",", ":"),
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes, sha256: str) -> Recipe:
        """A recipe from its text.

        Args:
            data: Result of `to_bytes`.
            sha256: The expected hash.

        Raises:
            InvalidModel: If it has another hash, or is malformed.
        """
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            raise InvalidModel(f"the recipe of stage {sha256[:12]} has sha256 {found}: fetch it again")
        try:
            return cls._from_json(json.loads(data))
        except (ValueError, KeyError, TypeError, IndexError, binascii.Error) as error:
            raise InvalidModel(
                f"the recipe of stage {sha256[:12]} cannot be parsed ({error}): install the same spanmesh on "
                "every host"
            ) from None

    @classmethod
    def _from_json(cls, said: dict[str, Any]) -> Recipe:
        if said["version"] != _VERSION:
            raise ValueError(f"version {said['version']}")
        start, stop, n_layers = (int(number) for number in said["layers"])
        tensors = tuple(_tensor(entry) for entry in said["tensors"])
        alignment = int(said["alignment"])
        if alignment < 1:
            raise ValueError(f"alignment {alignment}")
        header = base64.b64decode(said["header"], validate=True)
        return cls(str(said["model"]), LayerRange(start, stop), n_layers, alignment, header, tensors)


def _tensor(entry: list[Any]) -> RecipeTensor:
    num_bytes = int(entry[1])
    if num_bytes < 0:
        raise ValueError(f"a tensor of {num_bytes} bytes")
    if entry[0] is None:
        return RecipeTensor(num_bytes)
    hashes = tuple(str(sha256) for sha256 in entry[3])
    if len(hashes) != -(-num_bytes // PIECE_BYTES):
        raise ValueError(f"{len(hashes)} hashes for {num_bytes} bytes")
    return RecipeTensor(num_bytes, str(entry[0]), _region(num_bytes, entry[2]), hashes)


def _place(region: Region) -> list[int]:
    apart = () if region.is_whole else (region.row_bytes, region.stride_bytes)
    return [region.file, region.start, *apart]


def _region(num_bytes: int, place: list[Any]) -> Region:
    file, start, *apart = (int(number) for number in place)
    row_bytes, stride_bytes = apart or (0, 0)
    if min(file, start) < 0 or (apart and not 0 < row_bytes <= stride_bytes):
        raise ValueError(f"a tensor at {place}")
    return Region(file, start, num_bytes, row_bytes, stride_bytes)
