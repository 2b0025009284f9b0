"""Projector at work: libmtmd's context, which makes rows of pictures.

libmtmd ends the process on what it does not expect, so this belongs into a process of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from spanmesh_proto.errors import ClusterError, InvalidModel, InvalidRequest, StageFailed
from spanmesh_proto.image_chunk import ImageChunk
from stages.gguf import part_paths, read_header
from stages.runtime.bindings import llama_cpp
from stages.runtime.devices import GpuPlacing, device_pointers, layer_devices
from stages.runtime.llama import init_backend, last_complaint, route_log
from stages.runtime.llama_libraries import kernels_sha256, loaded_kernels, tiled_products
from stages.runtime.process_memory import peak_resident_bytes
from stages.vision.chunks import PictureParts, encoder_identity
from stages.vision.library import load_mtmd, mtmd_build
from stages.vision.picture import CHANNELS, Picture
from stages.vision.projector_file import check_projector
from stages.weights.hashing import stamps_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from stages.runtime.devices import Device
    from stages.vision.chunks import Part
    from stages.weights.hashing import FileStamp

MOST_ROWS: Final = 4096
"""Of a picture, all of its slices together."""

MOST_TOKENS: Final = 1024
"""Of a picture, where a projector takes any size, unless the user says otherwise."""

# llama.cpp's LLAMA_LOAD_MODE_NONE: with any other a model without memory ends the process.
_LOAD_NOTHING: Final = 0
# What mtmd_tokenize answers where a picture cannot be prepared.
_NOT_PREPARED: Final = 2
# Of pictures that show how large chunks become: from small to large, and strips.
_SIDES: Final = (64, 256, 1024, 4096)
_OF_LAYOUT: Final = frozenset({"general.alignment", "spanmesh.padding"})
_READ_BYTES: Final = 2**24
_BLANK: Final = Picture(256, 256, bytes(256 * 256 * CHANNELS))
_MARKER: Final = b"<__media__>"


@dataclass(frozen=True)
class ProjectorOptions:
    """Settings of a projector."""

    path: str
    """The projector's file."""
    model: str
    """The model's file, the first one if there are several."""
    num_threads: int
    """Threads of the processor."""
    device: str | None = None
    """llama.cpp's name of the GPU that computes; None for the processor."""
    most_tokens: int = MOST_TOKENS
    """Most rows of a picture, where a projector takes any size: larger pictures are scaled down."""

    @property
    def model_path(self) -> Path:
        """The model's file, the first one if there are several."""
        return Path(self.model)


@dataclass(frozen=True)
class ProjectorFacts:
    """Facts of a loaded projector."""

    kind: str
    """llama.cpp's name of its kind."""
    width: int
    """Numbers of a row: the model's `n_embd_inp`."""
    most_at_once: int
    """Most rows of a chunk whose rows all see each other, so that stages compute it in one batch; 0 if there
    are no such chunks."""
    identity: str
    """Digest of all that rows depend on besides pixels, in hexadecimal: see `encoder_identity`."""
    device: str = ""
    """llama.cpp's name of the GPU that computes; empty for the processor."""


@dataclass(frozen=True)
class ProjectorMemory:
    """Memory of a process with a projector, behind a blank picture of as many rows as one may have."""

    host_bytes: int
    """The most of the host's own memory that it has had, Python and llama.cpp's code included."""
    device_bytes: int = 0
    """What was taken of the GPU's own memory; 0 without one, or if it does not report that."""


class Projector:
    """A loaded projector. Not thread-safe.

    It needs the model for its vocabulary, its width and its kind of positions; no weights of it are loaded.

    Args:
        options: Its settings.

    Raises:
        InvalidModel: If the projector is none for pictures, is not served, or does not belong to the model,
            or a file was changed meanwhile.
        ClusterError: If libmtmd or the device is missing.
        StageFailed: If it does not compute.

    Attributes:
        facts: Facts of it.
    """

    def __init__(self, options: ProjectorOptions) -> None:
        self._model: Any = None
        self._context: Any = None
        path, model = Path(options.path), Path(options.model)
        kind = check_projector(path, model)
        self._mtmd = load_mtmd()
        init_backend()
        self._kernels = loaded_kernels()
        route_log(self._mtmd.mtmd_helper_log_set)
        self._device = None if options.device is None else _device_of(options.device)
        files = (path, *part_paths(model))
        stamps = stamps_of(files)
        try:
            self._model = _load_vocabulary(model)
            self._context = self._load(options)
            sha256 = _unchanged_sha256(path, files, stamps)
            device = self._device
            settings = f"most_tokens={options.most_tokens} computed_by={_computed_by(device)}"
            settings += f" kernels={kernels_sha256(self._kernels)}"
            self.facts = ProjectorFacts(
                kind=kind,
                width=llama_cpp.llama_model_n_embd_inp(self._model),
                most_at_once=self._most_at_once(options.most_tokens),
                identity=encoder_identity(sha256, mtmd_build(), settings).hex(),
                device="" if device is None else device.name,
            )
            self._check()
        except BaseException:
            self.close()
            raise

    def parts(self, width: int, height: int) -> PictureParts:
        """What becomes of a picture of this size; without its pixels, in milliseconds.

        Raises:
            InvalidRequest: If the projector takes none of this size, or it has too many rows.
            StageFailed: If libmtmd fails.
        """
        with self._chunks(width, height, None) as chunks:
            parts = self._parts(chunks)
        if parts.num_rows > MOST_ROWS:
            raise InvalidRequest(
                f"the picture of {width} × {height} pixels becomes {parts.num_rows} rows, {MOST_ROWS} are"
                " the most: scale it down"
            )
        if _at_once(parts) > self.facts.most_at_once:
            raise InvalidRequest(
                f"the picture of {width} × {height} pixels becomes {_at_once(parts)} rows that see each"
                f" other, {self.facts.most_at_once} are the most: send it in another shape"
            )
        return parts

    def encode(self, picture: Picture) -> tuple[NDArray[np.float32], ...]:
        """Rows of a picture.

        Returns:
            float32 (num_rows, width) of each of its chunks.

        Raises:
            InvalidRequest: See `parts`.
            StageFailed: If libmtmd fails, or computes no numbers.
        """
        parts = self.parts(picture.width, picture.height)
        with self._chunks(picture.width, picture.height, picture.rgb) as chunks:
            if self._parts(chunks) != parts:
                raise StageFailed("libmtmd divides a picture otherwise than its size alone says")
            return tuple(
                self._rows(chunk, part.num_rows)
                for chunk, part in zip(chunks, parts.parts, strict=True)
                if isinstance(part, ImageChunk)
            )

    def measured(self) -> ProjectorMemory:
        """Memory with a blank picture of as many rows as one may have, which takes as long as any.

        Raises:
            StageFailed: If libmtmd fails.
        """
        picture = self._most_rows()
        self.encode(Picture(picture[0], picture[1], bytes(picture[0] * picture[1] * CHANNELS)))
        taken_bytes = 0
        if self._device is not None:
            free_bytes = _device_of(self._device.name).free_bytes
            taken_bytes = max(0, self._device.free_bytes - free_bytes)
        return ProjectorMemory(peak_resident_bytes(), taken_bytes)

    def close(self) -> None:
        """Free all memory. It is unusable afterwards."""
        if self._context is not None:
            self._mtmd.mtmd_free(self._context)
            self._context = None
        if self._model is not None:
            llama_cpp.llama_model_free(self._model)
            self._model = None

    def _load(self, options: ProjectorOptions) -> Any:
        params = self._mtmd.mtmd_context_params_default()
        params.use_gpu = self._device is not None
        if self._device is not None:
            params.device = device_pointers([self._device])[0]
        params.n_threads = options.num_threads
        params.image_max_tokens = options.most_tokens
        params.print_timings = False
        # A picture of its own is computed below, which reports failures.
        params.warmup = False
        context = self._mtmd.mtmd_init_from_file(options.path.encode(), self._model, params)
        if context is None:
            raise InvalidModel(
                f"{Path(options.path).name} is no projector of {Path(options.model).name}, or is damaged:"
                f" {last_complaint().splitlines()[0]}; take the mmproj file of the same model"
            )
        return context

    def _most_at_once(self, most_tokens: int) -> int:
        found = set()
        for width, height in product(_SIDES, _SIDES):
            with suppress(InvalidRequest), self._chunks(width, height, None) as chunks:
                parts = self._parts(chunks)
                # Others are refused in any case.
                if parts.num_rows <= MOST_ROWS:
                    found.add(_at_once(parts))
        # Where they depend on the size, another one has some rows more, up to the bound.
        return max(found, default=0) if len(found) <= 1 else max(most_tokens, *found)

    def _most_rows(self) -> tuple[int, int]:
        """Width and height of the smallest square picture with the most rows that one may have."""
        found = (_BLANK.width, _BLANK.height)
        num_rows = self.parts(*found).num_rows
        for side in _SIDES:
            with suppress(InvalidRequest):
                count = self.parts(side, side).num_rows
                if count > num_rows:
                    found, num_rows = (side, side), count
        return found

    def _check(self) -> None:
        """Encode a blank picture: better now than in a request."""
        tokens = self.parts(_BLANK.width, _BLANK.height).tokens
        if tokens and min(tokens) < 0:
            raise InvalidModel(
                f"the model's vocabulary lacks a token that a projector of kind {self.facts.kind} puts beside"
                " pictures: take the mmproj file of the same model"
            )
        self.encode(_BLANK)

    @contextmanager
    def _chunks(self, width: int, height: int, rgb: bytes | memoryview | None) -> Iterator[tuple[Any, ...]]:
        """Parts of a picture as libmtmd has them, freed behind the block."""
        mtmd = self._mtmd
        pixels = (
            None if rgb is None else ctypes.cast(ctypes.c_char_p(bytes(rgb)), ctypes.POINTER(ctypes.c_uint8))
        )
        bitmap = mtmd.mtmd_bitmap_init(width, height, pixels)
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            text = mtmd.mtmd_input_text(_MARKER, len(_MARKER), False, True)  # noqa: FBT003 - fields in C
            bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
            status = mtmd.mtmd_tokenize(self._context, chunks, ctypes.byref(text), bitmaps, 1)
            if status == _NOT_PREPARED:
                raise InvalidRequest(
                    f"the model's projector takes no picture of {width} × {height} pixels: scale it or cut it"
                )
            if status != 0:
                raise StageFailed(f"mtmd_tokenize failed with status {status}: {last_complaint()}")
            count = mtmd.mtmd_input_chunks_size(chunks)
            yield tuple(mtmd.mtmd_input_chunks_get(chunks, index) for index in range(count))
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def _parts(self, chunks: Sequence[Any]) -> PictureParts:
        found: list[Part] = []
        first_row = 0
        for chunk in chunks:
            part = self._part(chunk, first_row)
            found.append(part)
            first_row += part.num_rows if isinstance(part, ImageChunk) else len(part)
        return PictureParts(tuple(found))

    def _part(self, chunk: Any, first_row: int) -> Part:
        mtmd = self._mtmd
        if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            size = ctypes.c_size_t()
            tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(size))
            return tuple(tokens[: size.value])
        places = self._places(chunk, mtmd.mtmd_input_chunk_get_n_tokens(chunk))
        sees_all = mtmd.mtmd_decode_use_non_causal(self._context, chunk)
        found = _chunk_of(first_row, places, mtmd.mtmd_input_chunk_get_n_pos(chunk), sees_all=sees_all)
        if found is None:
            raise InvalidModel(
                "the projector places its rows neither one after the other nor in a grid, which is not known"
                " here: leave out --mmproj"
            )
        return found

    def _places(self, chunk: Any, num_rows: int) -> NDArray[np.int64]:
        """int64 (num_rows, 3): time, y and x of each row, from the first one's position on."""
        image = self._mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        found = (self._mtmd.mtmd_image_tokens_get_decoder_pos(image, 0, row) for row in range(num_rows))
        return np.array([(at.t, at.y, at.x) for at in found], np.int64).reshape(num_rows, 3)

    def _rows(self, chunk: Any, num_rows: int) -> NDArray[np.float32]:
        with tiled_products(self._kernels):
            status = self._mtmd.mtmd_encode_chunk(self._context, chunk)
        if status != 0:
            raise StageFailed(f"mtmd_encode_chunk failed with status {status}: {last_complaint()}")
        pointer = self._mtmd.mtmd_get_output_embd(self._context)
        # A copy: libmtmd frees it with the next chunk.
        rows: NDArray[np.float32] = np.ctypeslib.as_array(pointer, (num_rows, self.facts.width)).copy()
        if not np.isfinite(rows).all():
            raise StageFailed("the projector computed rows that hold no numbers: its file is damaged")
        return rows


def _at_once(parts: PictureParts) -> int:
    return max((chunk.num_rows for chunk in parts.chunks if chunk.sees_all), default=0)


def _unchanged_sha256(path: Path, files: Iterable[Path], stamps: tuple[FileStamp, ...]) -> bytes:
    """SHA-256 of what a file that was loaded holds.

    Metadata and tensors count, not where they lie: a host that fetched them has them in another layout.

    Raises:
        InvalidModel: If a file of those that were loaded is another one by now.
    """
    header, digest = read_header(path), hashlib.sha256()
    for key, value in sorted(header.metadata.items()):
        if key not in _OF_LAYOUT:
            digest.update(f"{key} {value.type} {value.count} {len(value.payload)} ".encode() + value.payload)
    with path.open("rb") as file:
        for name, tensor in sorted(header.tensors.items()):
            digest.update(f"{name} {tensor.shape} {tensor.type} {tensor.n_bytes} ".encode())
            file.seek(tensor.offset_bytes)
            for at in range(0, tensor.n_bytes, _READ_BYTES):
                digest.update(file.read(min(_READ_BYTES, tensor.n_bytes - at)))
    sha256 = digest.digest()
    if stamps_of(files) != stamps:
        raise InvalidModel(f"{path.name} or its model was changed while it was loaded; try again")
    return sha256


def _chunk_of(
    first_row: int, places: NDArray[np.int64], num_positions: int, *, sees_all: bool
) -> ImageChunk | None:
    """The chunk whose rows have these places; None if they neither follow one another nor lie in a grid.

    Args:
        first_row: Its first row.
        places: int64 (rows, 3): time, y and x, from the first row's position on.
        num_positions: Positions that it takes.
        sees_all: Whether its rows all see each other.
    """
    numbers = np.arange(len(places))
    is_line = bool((places == numbers[:, None]).all())
    columns = 0 if is_line else int(places[:, 2].max()) + 1
    if columns:
        grid = np.stack([np.zeros_like(numbers), numbers // columns, numbers % columns], axis=1)
        if len(places) % columns or (places != grid).any():
            return None
    chunk = ImageChunk(first_row, len(places), columns, sees_all)
    return chunk if chunk.num_positions == num_positions else None


def _load_vocabulary(path: Path) -> Any:
    """The `llama_model` without memory for weights.

    With the vocabulary only, its width would be 0, and a projector of another model would pass.

    Raises:
        InvalidModel: If llama.cpp cannot load it.
    """
    params = llama_cpp.llama_model_default_params()
    params.no_alloc = True
    params.load_mode = _LOAD_NOTHING
    GpuPlacing((), ()).apply(params)
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if model is None:
        raise InvalidModel(f"llama.cpp does not load {path.name}: {last_complaint()}")
    return model


def _device_of(name: str) -> Device:
    """A device of llama.cpp, with its free memory.

    Raises:
        ClusterError: If there is none of this name.
    """
    devices = layer_devices()
    found = [device for device in devices if device.name == name]
    if not found:
        known = ", ".join(device.name for device in devices) or "none"
        raise ClusterError(f"{name} is no GPU that llama.cpp finds on this host; it finds {known}")
    return found[0]


def _computed_by(device: Device | None) -> str:
    """What computes: the GPU, or the processor's kind and those of its instructions that llama.cpp uses."""
    if device is not None:
        return f"{device.backend} {device.description}"
    return f"{platform.machine()} {llama_cpp.llama_print_system_info().decode(errors='replace')}"
