"""Certification of models that read pictures: libmtmd's own evaluation of the whole model against stages.

A prompt has two pictures with text between them, and tokens follow it. The expected logits come from
its helpers: its chunks, its positions and its switch of attention. Pictures reach the stages as
they do in a mesh: by `stages.vision.projector`, with ids of their rows.
"""

from __future__ import annotations

import ctypes
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import llama_cpp
import numpy as np

from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import InvalidModel, MeshError
from spanmesh_proto.image_chunk import ImageChunk
from stages.gguf import read_header
from stages.runtime.llama_libraries import loaded_kernels, tiled_products
from stages.runtime.numerics import EXACT_MAX_ROWS
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.source_model import read_source
from stages.vision.library import load_mtmd
from stages.vision.picture import Picture
from stages.vision.projector import Projector, ProjectorOptions
from stages.vision.projector_file import check_projector
from tests.qualification.families_table import Outcome, PictureRecord
from tests.support.stage_chain import Stages
from tests.support.tiny_vision import Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.qualification.picture_families import PictureFamily, RefusedFamily

_MARKER: Final = "<__media__>"
_TEXTS: Final = ("LOOK: ", " AND THEN ", " WHAT IS IT?")
_SIZES: Final = ((210, 150), (96, 64))
_ANSWER: Final = (21, 22, 23, 24, 25, 26)
_CTX_SIZE: Final = 512
# Fast kernels mistake narrower matrices of repacked weights, in text as well.
_LEAST_COLUMNS: Final = 64


class MtmdModel:
    """A whole model and its projector, evaluated by libmtmd.

    Args:
        model: The text model.
        projector: The projector.
        options: Settings of the context.
        most_tokens: See `ProjectorOptions`.
    """

    def __init__(self, model: Path, projector: Path, options: RuntimeOptions, most_tokens: int) -> None:
        self._runtime = StageRuntime(model, options)
        self._context = self._runtime._context
        self._mtmd = load_mtmd()
        params = self._mtmd.mtmd_context_params_default()
        params.use_gpu = params.print_timings = params.warmup = False
        params.n_threads = options.num_threads
        params.image_max_tokens = most_tokens
        model_pointer = self._runtime._model
        self._projector = self._mtmd.mtmd_init_from_file(str(projector).encode(), model_pointer, params)
        if self._projector is None:
            raise InvalidModel(f"libmtmd does not load {projector.name}")

    @property
    def most_rows(self) -> int:
        """Rows that are computed at once."""
        return self._runtime.most_rows

    def close(self) -> None:
        """Free all memory."""
        self._mtmd.mtmd_free(self._projector)
        self._runtime.close()

    def logits(self, pictures: Sequence[Picture]) -> list[NDArray[np.float32]]:
        """Logits behind the prompt with these pictures, and behind each token of the answer."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), 0, -1, -1)
        past = llama_cpp.llama_pos(0)
        chunks = self._chunks(pictures)
        try:
            for index in range(self._mtmd.mtmd_input_chunks_size(chunks)):
                chunk = self._mtmd.mtmd_input_chunks_get(chunks, index)
                is_text = self._mtmd.mtmd_input_chunk_get_type(chunk) == self._mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT
                status = (self._read_text if is_text else self._read_picture)(chunk, past)
                if status != 0:
                    raise InvalidModel(f"libmtmd evaluated chunk {index} with status {status}")
        finally:
            self._mtmd.mtmd_input_chunks_free(chunks)
        return [self._last(), *(self._next(token, past.value + at) for at, token in enumerate(_ANSWER))]

    def _read_text(self, chunk: Any, past: ctypes.c_int32) -> int:
        status: int = self._mtmd.mtmd_helper_eval_chunk_single(
            self._projector,
            self._context,
            chunk,
            past.value,
            0,
            self.most_rows,
            True,  # noqa: FBT003 - logits of the last row
            ctypes.byref(past),
        )
        return status

    def _read_picture(self, chunk: Any, past: ctypes.c_int32) -> int:
        # Its rows in the bits that a mesh has: stages are compared, not products of matrices.
        with tiled_products(loaded_kernels()):
            status: int = self._mtmd.mtmd_encode_chunk(self._projector, chunk)
        return status or self._mtmd.mtmd_helper_decode_image_chunk(
            self._projector,
            self._context,
            chunk,
            self._mtmd.mtmd_get_output_embd(self._projector),
            past.value,
            0,
            self.most_rows,
            ctypes.byref(past),
            self._mtmd.mtmd_helper_post_decode_callback(),
            None,
        )

    def _chunks(self, pictures: Sequence[Picture]) -> Any:
        text = _MARKER.join(_TEXTS).encode()
        bitmaps = []
        for picture in pictures:
            pixels = ctypes.cast(ctypes.c_char_p(bytes(picture.rgb)), ctypes.POINTER(ctypes.c_uint8))
            bitmaps.append(self._mtmd.mtmd_bitmap_init(picture.width, picture.height, pixels))
        chunks = self._mtmd.mtmd_input_chunks_init()
        asked = self._mtmd.mtmd_input_text(text, len(text), True, True)  # noqa: FBT003 - fields in C
        array = (self._mtmd.mtmd_bitmap_p_ctypes * len(bitmaps))(*bitmaps)
        status = self._mtmd.mtmd_tokenize(self._projector, chunks, ctypes.byref(asked), array, len(bitmaps))
        for bitmap in bitmaps:
            self._mtmd.mtmd_bitmap_free(bitmap)
        if status != 0:
            raise InvalidModel(f"mtmd_tokenize failed with status {status}")
        return chunks

    def _next(self, token: int, position: int) -> NDArray[np.float32]:
        # Both exist until the end of the call.
        tokens, place = (ctypes.c_int32 * 1)(token), (ctypes.c_int32 * 1)(position)
        batch = llama_cpp.llama_batch_get_one(tokens, 1)
        batch.pos = ctypes.cast(place, ctypes.POINTER(ctypes.c_int32))
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise InvalidModel("llama_decode failed")
        return self._last()

    def _last(self) -> NDArray[np.float32]:
        pointer = llama_cpp.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(pointer, (self._runtime.info.n_vocab,)).copy()


def certify_pictures(model: Path, projector: Path, *, exact: bool, most_cuts: int | None = None) -> list[int]:
    """Compare stages, cut at every place that the rules allow, with the whole model.

    Args:
        model: The text model.
        projector: Its projector.
        exact: Whether in exact mode.
        most_cuts: Most cuts that are tried, the outermost first; None for all.

    Returns:
        Rows of the chunks of both pictures.

    Raises:
        MeshError: If they are not the same bits, naming the cuts, or a picture makes no difference.
    """
    source = read_source(model)
    cuts = source.allowed_cuts
    chosen = cuts if most_cuts is None else (cuts[0], cuts[-1], *cuts[1:-1])[:most_cuts]
    options = ProjectorOptions(str(projector), str(model), num_threads=1)
    with closing(Projector(options)) as loaded:
        prompts = [list(_parts(loaded, model, pictures)) for pictures in (_pictures(1), _pictures(2))]
    rows = [len(part.rows) for part in prompts[0] if part.rows is not None]
    settings = RuntimeOptions(
        ctx_size=_CTX_SIZE,
        exact=exact,
        repacks=_is_wide(model),
        most_at_once=max((len(part.ids) for part in prompts[0] if part.sees_all), default=0),
    )
    with closing(MtmdModel(model, projector, settings, options.most_tokens)) as whole:
        expected, other = (whole.logits(_pictures(seed)) for seed in (1, 2))
        window = whole.most_rows
    # Where the head gathers no rows, libmtmd's logits behind a prompt are those of another row.
    first = int(source.family.entry.marks_all_rows)
    if any(map(np.array_equal, expected, other)):
        raise MeshError("another picture makes no difference")
    unequal = [
        places
        for places in ((), *((cut,) for cut in chosen), (cuts[0], cuts[-1]))
        if not _is_same(model, places, settings, prompts, (expected, other), window=window, first=first)
    ]
    if unequal:
        raise MeshError(
            "logits behind pictures differ from those of the whole model, cut at "
            + ", ".join(" and ".join(map(str, places)) or "no place" for places in unequal)
        )
    return rows


def _is_same(
    model: Path,
    cuts: tuple[int, ...],
    options: RuntimeOptions,
    prompts: Sequence[Sequence[Part]],
    expected: Sequence[Sequence[NDArray[np.float32]]],
    *,
    window: int,
    first: int,
) -> bool:
    most = EXACT_MAX_ROWS if options.exact else window
    with closing(Stages(model, tuple(dict.fromkeys(cuts)), options)) as stages:
        found = [stages.run(parts, answer=_ANSWER, window=most) for parts in prompts]
    return all(
        one.tobytes() == other.tobytes()
        for logits, wanted in zip(found, expected, strict=True)
        for one, other in zip(logits[first:], wanted[first:], strict=True)
    )


def _pictures(seed: int) -> tuple[Picture, ...]:
    noise = np.random.default_rng(seed)
    return tuple(Picture(width, height, noise.bytes(3 * width * height)) for width, height in _SIZES)


def _parts(projector: Projector, model: Path, pictures: Sequence[Picture]) -> Iterator[Part]:
    """The prompt, its tokens joined as libmtmd joins them."""
    tokenizer = Tokenizer(model)
    tokens: list[int] = []
    for index, text in enumerate(_TEXTS):
        tokens += tokenizer.encode(text, add_special=index == 0, parse_special=True)
        for part, rows in _picture(projector, pictures[index]) if index < len(pictures) else ():
            if rows is None:
                tokens += part
                continue
            if tokens:
                yield Part(tuple(tokens))
            tokens = []
            yield Part((), rows, part.columns, part.sees_all)
    yield Part(tuple(tokens))


def _picture(projector: Projector, picture: Picture) -> Iterator[tuple[Any, NDArray[np.float32] | None]]:
    rows = iter(projector.encode(picture))
    for part in projector.parts(picture.width, picture.height).parts:
        yield part, next(rows) if isinstance(part, ImageChunk) else None


def _is_wide(model: Path) -> bool:
    """Whether fast kernels compute all its matrices right."""
    tensors = read_header(model).tensors.values()
    return min(tensor.shape[0] for tensor in tensors if tensor.type.name == "Q8_0") >= _LEAST_COLUMNS


def examine_pictures(name: str, family: PictureFamily, folder: Path, *, exact: bool) -> PictureRecord:
    """Certify a family in one numeric mode.

    Args:
        name: Its name.
        family: Its tiny models.
        folder: An empty folder for them and their stages.
        exact: Whether in exact mode.
    """
    model, projector = family.write(folder)
    source = read_source(model)
    record = PictureRecord(
        name,
        Outcome.WRONG,
        architecture=source.header.architecture,
        projector=read_header(projector).text("clip.projector_type", ""),
        n_layers=source.n_layers,
        allowed_cuts=source.allowed_cuts,
    )
    try:
        check_projector(projector, model)
        rows = certify_pictures(model, projector, exact=exact)
    except MeshError as error:
        mode = "exact" if exact else "fast"
        return replace(record, reason=f"in {mode} mode: {error.message}")
    return replace(record, outcome=Outcome.BIT_EQUAL, num_rows=tuple(rows))


def examine_refused(name: str, family: RefusedFamily, folder: Path) -> PictureRecord:
    """See whether a family is refused, with or without stages.

    Args:
        name: Its name.
        family: Its tiny model and the header of its projector.
        folder: An empty folder for them.
    """
    model, projector = family.write(folder)
    source = read_source(model)
    record = PictureRecord(
        name,
        Outcome.WRONG,
        "neither its projector nor a cut is refused",
        source.header.architecture,
        family.kind,
        source.n_layers,
        source.allowed_cuts,
    )
    reason = "" if source.allowed_cuts else next(iter(source.refused_cuts.values()), "")
    try:
        check_projector(projector, model)
    except MeshError as error:
        reason = error.message
    if reason:
        return replace(record, outcome=Outcome.REFUSED, reason=reason)
    return record
