"""KV rows of one stage, put into another with the same layers, are as good as computed there."""

import itertools
import struct
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanmesh_proto.errors import InvalidWindow, StageFailed, UncuttableModel
from stages.certification.certify import cut_stage
from stages.layers import LayerRange
from stages.runtime.devices import list_devices
from stages.runtime.kv_state import KvRows
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel

NUM_ROWS = 60
SLIDING = {"gpt-oss", "gemma4", "gemma4-e"}
RECURRENT = {"mamba2", "falcon-h1", "qwen3next", "nemotron_h", "granitehybrid"}
WITHOUT_ROWS = SLIDING | RECURRENT
HEAD = b"GGSQ" + struct.pack("<i", 1)
TEXT = [int(token) for token in np.random.default_rng(3).integers(3, 300, NUM_ROWS + 8)]


def saved_cache(
    positions: range, *, num_streams: int = 3, is_transposed: bool = False, ext: int = 0
) -> bytes:
    """What llama.cpp saves: each row's bytes tell its position, its layer and whether it is a key."""
    pieces = [struct.pack("<I", num_streams), struct.pack("<I", 0), struct.pack("<I", len(positions))]
    pieces += [struct.pack("<iI", position, 1) + bytes(ext) + struct.pack("<i", 1) for position in positions]
    pieces.append(struct.pack("<II", is_transposed, 2))
    for layer in range(2):
        pieces.append(struct.pack("<iQ", 1, 4 + layer))
        pieces += [bytes([position, layer, 0, *range(1 + layer)]) for position in positions]
    for layer in range(2):
        if is_transposed:
            pieces.append(struct.pack("<iII", 1, 2, 3))
            pieces += [
                bytes([position, 10 * layer + element]) for element in range(3) for position in positions
            ]
        else:
            pieces.append(struct.pack("<iQ", 1, 3))
            pieces += [bytes([position, layer, 1]) for position in positions]
    return b"".join([*pieces, struct.pack("<I", 0) * (num_streams - 2)])


@given(
    stop=st.integers(1, 40),
    cuts=st.lists(st.integers(1, 39), max_size=4),
    is_transposed=st.booleans(),
    ext=st.sampled_from([0, 12]),
    num_caches=st.integers(1, 2),
)
def test_ranges_put_together_are_what_was_saved(
    *, stop: int, cuts: list[int], is_transposed: bool, ext: int, num_caches: int
) -> None:
    def saved(positions: range) -> bytes:
        return HEAD + num_caches * saved_cache(positions, is_transposed=is_transposed, ext=ext)

    whole = KvRows.from_bytes(saved(range(stop)))
    assert whole.to_bytes() == saved(range(stop))
    bounds = sorted({0, stop, *(cut for cut in cuts if cut < stop)})
    parts = []
    for first, last in itertools.pairwise(bounds):
        part = KvRows.from_bytes(whole.cut(first, last).to_bytes())
        assert (part.start, part.stop, len(part)) == (first, last, last - first)
        assert part.to_bytes() == saved(range(first, last))
        parts.append(part)
    together = parts[0]
    for part in parts[1:]:
        together = together.followed_by(part)
    assert together.to_bytes() == saved(range(stop))
    assert parts[0].joined(parts[1:]).tobytes() == saved(range(stop))


@given(data=st.data())
def test_what_is_no_rows_is_refused(data: st.DataObject) -> None:
    saved = HEAD + saved_cache(range(4))
    with pytest.raises(UncuttableModel, match="cannot be split by rows"):
        KvRows.from_bytes(saved[: data.draw(st.integers(0, len(saved) - 1))])
    with pytest.raises(UncuttableModel, match="cannot be split by rows"):
        KvRows.from_bytes(saved + data.draw(st.binary(min_size=1, max_size=40)))


def test_cells_in_any_order_are_brought_into_that_of_positions() -> None:
    saved = HEAD + saved_cache(range(4))
    # Each cell's record is 12 bytes; its key and value in each layer tell its position.
    mixed = KvRows.from_bytes(saved)
    shuffled = replace(
        mixed, _caches=tuple(cache.reordered(np.array([2, 0, 3, 1])) for cache in mixed._caches)
    )
    assert shuffled.to_bytes() != saved
    assert KvRows.from_bytes(shuffled.to_bytes()).to_bytes() == saved


Place = tuple[int, int, int]


def places_of(parts: list[tuple[int, int]]) -> list[Place]:
    """Position, y and x of each row: a word is a picture of one row, others have some lines and columns."""
    places: list[Place] = []
    position = 0
    for height, width in parts:
        places += [(position, position + y, position + x) for y in range(height) for x in range(width)]
        position += max(height, width)
    return places


def saved_places(places: list[Place], rows: list[int]) -> bytes:
    """One cache of such rows, whose keys tell the number of the row."""
    pieces = [struct.pack("<II", 1, len(rows))]
    for row in rows:
        position, y, x = places[row]
        pieces.append(struct.pack("<iIiiii", position, 1, x, y, row, 1))
    pieces += [struct.pack("<II", 0, 1), struct.pack("<iQ", 1, 2), *(bytes([row, 7]) for row in rows)]
    return HEAD + b"".join(pieces)


@given(
    parts=st.lists(st.just((1, 1)) | st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=9),
    data=st.data(),
)
def test_rows_of_pictures_are_cut_and_put_together_by_rows(
    parts: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Rows of a picture share a position, and fewer positions than rows follow from them."""
    places = places_of(parts)
    count = len(places)
    saved = saved_places(places, list(range(count)))
    shuffled = saved_places(places, data.draw(st.permutations(range(count))))
    whole = KvRows.from_bytes(shuffled, 0)
    assert (whole.start, whole.stop) == (0, count)
    assert whole.to_bytes() == saved
    cut = data.draw(st.integers(0, count))
    bounds = sorted({0, cut, count})
    halves = [
        KvRows.from_bytes(whole.cut(first, last).to_bytes(), first)
        for first, last in itertools.pairwise(bounds)
    ]
    assert [(half.start, half.stop) for half in halves] == list(itertools.pairwise(bounds))
    assert halves[0].joined(halves[1:]).tobytes() == saved


@pytest.mark.parametrize(
    "rows", [(0, 1, *range(3, 12)), (*range(8), 9, 10, 11), (*range(7), *range(8, 12)), (*range(12), 4)]
)
def test_a_row_that_is_missing_or_there_twice_shows(rows: tuple[int, ...]) -> None:
    """Without a word before or behind a picture, or its last row."""
    places = places_of([(1, 1)] * 3 + [(2, 2)] + [(1, 1)] * 5)
    assert len(KvRows.from_bytes(saved_places(places, list(range(12))), 0)) == 12
    with pytest.raises(UncuttableModel, match="cannot be split by rows"):
        KvRows.from_bytes(saved_places(places, list(rows)), 0)


def test_a_sequence_may_be_put_into_another_stream() -> None:
    rows = KvRows.from_bytes(HEAD + saved_cache(range(4), num_streams=3))
    assert rows.in_streams(5, 1).to_bytes() == HEAD + saved_cache(range(4), num_streams=5)
    alone = rows.in_streams(1, 0)
    assert struct.unpack_from("<III", alone.to_bytes(), len(HEAD))[:2] == (1, 4)
    assert KvRows.from_bytes(alone.to_bytes()).in_streams(3, 1).to_bytes() == rows.to_bytes()


def plain_cache(positions: range, num_elements: int, *, is_transposed: bool) -> bytes:
    """One layer in F16; an element of a value tells its position and its index."""
    pieces = [struct.pack("<II", 1, len(positions))]
    pieces += [struct.pack("<iIi", position, 1, 1) for position in positions]
    pieces += [struct.pack("<II", is_transposed, 1), struct.pack("<iQ", 1, 2)]
    pieces += [bytes([position, 99]) for position in positions]
    if is_transposed:
        pieces.append(struct.pack("<iII", 1, 2, num_elements))
        pieces += [bytes([position, index]) for index in range(num_elements) for position in positions]
    else:
        pieces.append(struct.pack("<iQ", 1, 2 * num_elements))
        pieces += [bytes([position, index]) for position in positions for index in range(num_elements)]
    return b"".join(pieces)


@given(count=st.integers(1, 9), num_elements=st.integers(1, 7))
def test_values_are_transposed_and_back(count: int, num_elements: int) -> None:
    plain, other = (
        HEAD + plain_cache(range(count), num_elements, is_transposed=is_transposed)
        for is_transposed in (False, True)
    )
    assert KvRows.from_bytes(plain).transposed().to_bytes() == other
    assert KvRows.from_bytes(other).transposed().to_bytes() == plain
    for ours, theirs in itertools.product((plain, other), repeat=2):
        assert KvRows.from_bytes(ours).laid_out_as(KvRows.from_bytes(theirs)).to_bytes() == theirs


def test_quantised_values_are_never_transposed() -> None:
    saved = (HEAD + saved_cache(range(4))).replace(struct.pack("<iQ", 1, 3), struct.pack("<iQ", 8, 3))
    assert KvRows.from_bytes(saved).transposed().to_bytes() == saved


def test_positions_out_of_order_are_refused() -> None:
    one, two = HEAD + saved_cache(range(4)), HEAD + saved_cache(range(1, 5))
    for saved in (one + two[len(HEAD) :], one.replace(struct.pack("<iI", 2, 1), struct.pack("<iI", 7, 1), 1)):
        with pytest.raises(UncuttableModel, match="cannot be split by rows"):
            KvRows.from_bytes(saved)
    rows = KvRows.from_bytes(one)
    with pytest.raises(UncuttableModel, match="rows from 1 do not follow those before 4"):
        rows.followed_by(KvRows.from_bytes(two))
    with pytest.raises(UncuttableModel, match="different types or sizes"):
        rows.followed_by(KvRows.from_bytes(HEAD + saved_cache(range(4, 5), num_streams=4)))
    with pytest.raises(UncuttableModel, match="rows from 1 do not follow those before 4"):
        rows.joined([KvRows.from_bytes(two)])
    with pytest.raises(UncuttableModel, match="different types or sizes"):
        rows.joined([KvRows.from_bytes(HEAD + saved_cache(range(4, 5), num_streams=4))])
    with pytest.raises(ValueError, match="rows 2 to 5 of 0 to 4"):
        rows.cut(2, 5)


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "kv_type"),
    [
        ("llama", "f16"),
        ("qwen3", "q8_0"),
        ("granite", "q4_0"),
        *((name, "f16") for name in TINY_FAMILIES if name not in WITHOUT_ROWS),
    ],
)
def test_a_stage_goes_on_from_another_s_rows(name: str, kv_type: str, tmp_path: Path) -> None:
    """In pieces, into whatever slot, with other sequences beside it; bit-equal to the stage that computed."""
    options = RuntimeOptions(num_slots=3, ctx_size=128, exact=True, kv_type=kv_type)
    path = stage_of(name, tmp_path)
    with closing(StageRuntime(path, options)) as runtime, closing(StageRuntime(path, options)) as copy:
        runtime.decode([Span(0, 0, TEXT[5:9])])
        for start, stop in ((0, 33), (33, 40), (37, 41), (41, 60)):
            runtime.decode([Span(1, start, TEXT[start:stop])])
        saved = runtime.memory.kv_rows(1)
        assert (saved.start, saved.stop) == (0, NUM_ROWS)
        copy.decode([Span(1, 0, TEXT[7:30])])
        for start, stop in ((0, 20), (20, 52), (50, 60)):
            copy.memory.put_kv_rows(2, KvRows.from_bytes(saved.cut(start, stop).to_bytes()))
            assert copy.memory.length(2) == stop
        for start, stop in ((60, 61), (58, 66), (66, 68)):
            (expected,) = runtime.decode([Span(1, start, TEXT[start:stop])])
            (hidden,) = copy.decode([Span(2, start, TEXT[start:stop])])
            assert np.array_equal(hidden, expected), (start, stop)


@pytest.mark.model
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek2"])
def test_rows_pass_between_a_shared_cache_and_separate_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between a stage on a GPU, for which the processor stands in, and one without."""
    (processor,) = (device for device in list_devices() if device.kind == "cpu")
    monkeypatch.setattr("stages.runtime.devices.layer_devices", lambda: (processor,))
    monkeypatch.setattr("llama_cpp.llama_supports_gpu_offload", lambda: True)
    path = stage_of(name, tmp_path)
    on_gpu = RuntimeOptions(num_slots=3, ctx_size=128, gpu_layers=((processor.name, 1),))
    alone = replace(on_gpu, gpu_layers=())
    with closing(StageRuntime(path, on_gpu)) as shared, closing(StageRuntime(path, alone)) as separate:
        assert not shared.computes_runs
        assert separate.computes_runs
        # The later rows of slot 1 take cells before those of the first.
        shared.decode([Span(0, 0, TEXT[:10])])
        shared.decode([Span(1, 0, TEXT[:10])])
        shared.memory.trim(0, 0)
        shared.decode([Span(1, 10, TEXT[10:14])])
        for source, target, slot in ((shared, separate, 2), (separate, shared, 0)):
            held = 1 if source is shared else 2
            rows = source.memory.kv_rows(held)
            target.memory.put_kv_rows(slot, KvRows.from_bytes(rows.cut(0, 9).to_bytes()))
            target.memory.put_kv_rows(slot, KvRows.from_bytes(rows.cut(9, 14).to_bytes()))
            (expected,) = source.decode([Span(held, 14, TEXT[14:17])])
            (hidden,) = target.decode([Span(slot, 14, TEXT[14:17])])
            assert np.abs(hidden - expected).max() < 0.02 * np.abs(expected).max()
            source.memory.trim(held, 14)
            target.memory.trim(slot, 14)


@pytest.mark.model
def test_rows_that_do_not_belong_are_refused(tmp_path: Path) -> None:
    path, other = stage_of("llama", tmp_path), stage_of("deepseek2", tmp_path)
    options = RuntimeOptions(num_slots=3, ctx_size=64, exact=True)
    with closing(StageRuntime(path, options)) as runtime:
        runtime.decode([Span(0, 0, TEXT[:NUM_ROWS])])
        saved = runtime.memory.kv_rows(0)
        with pytest.raises(InvalidWindow, match="slot 3 of 3 does not exist"):
            runtime.memory.put_kv_rows(3, saved)
        with pytest.raises(InvalidWindow, match="rows 20 to 60 for slot 1, which ends at 0 of 64"):
            runtime.memory.put_kv_rows(1, saved.cut(20, 60))
        runtime.memory.copy(0, 1, 30)
        with pytest.raises(UncuttableModel, match="has yet to copy rows"):
            runtime.memory.kv_rows(1)
        runtime.decode([Span(2, 0, TEXT[:1])])
        runtime.memory.put_kv_rows(0, runtime.memory.kv_rows(1))
        assert runtime.memory.kv_rows(0).to_bytes() == saved.cut(0, 30).to_bytes()
        runtime.memory.copy(0, 1, 30)
        with pytest.raises(UncuttableModel, match="has yet to copy rows"):
            runtime.memory.put_saved(1, np.frombuffer(saved.to_bytes(), np.uint8), NUM_ROWS)
        runtime.decode([Span(2, 0, TEXT[:1])])
        runtime.memory.put_saved(0, np.frombuffer(saved.cut(0, 40).to_bytes(), np.uint8), 40)
        assert runtime.memory.kv_rows(0).to_bytes() == saved.cut(0, 40).to_bytes()
        with pytest.raises(InvalidWindow, match="65 saved positions exceed the context of 64"):
            runtime.memory.put_saved(0, np.frombuffer(saved.to_bytes(), np.uint8), 65)
        with closing(StageRuntime(other, options)) as unlike:
            unlike.decode([Span(0, 0, TEXT[:9])])
            with pytest.raises(StageFailed, match="rejects the KV rows of another stage"):
                unlike.memory.put_kv_rows(0, saved)
            assert unlike.memory.length(0) == 0
            unlike.decode([Span(0, 0, TEXT[:9])])
    with (
        closing(StageRuntime(path, RuntimeOptions(ctx_size=32, exact=True))) as smaller,
        pytest.raises(InvalidWindow, match="rows 0 to 60 for slot 0, which ends at 0 of 32"),
    ):
        smaller.memory.put_kv_rows(0, saved)


@pytest.mark.model
@pytest.mark.parametrize("name", sorted(SLIDING))
def test_what_has_no_rows_is_refused(name: str, tmp_path: Path) -> None:
    """Windows that have begun to slide."""
    with closing(StageRuntime(stage_of(name, tmp_path), RuntimeOptions(ctx_size=128, exact=True))) as runtime:
        runtime.decode([Span(0, 0, TEXT[:NUM_ROWS])])
        with pytest.raises(UncuttableModel, match="the saved state of a sequence has another format"):
            runtime.memory.kv_rows(0)


@pytest.mark.model
@pytest.mark.parametrize("name", sorted(RECURRENT))
def test_a_recurrent_state_put_behind_rows_is_as_good_as_computed(name: str, tmp_path: Path) -> None:
    options = RuntimeOptions(num_slots=2, ctx_size=128, exact=True, num_checkpoints=2)
    path = stage_of(name, tmp_path)
    with closing(StageRuntime(path, options)) as stage, closing(StageRuntime(path, options)) as other:
        stage.decode([Span(1, 0, TEXT[:40])])
        stage.decode([Span(1, 40, TEXT[40:50], checkpoints=(40,))])
        (further,) = stage.decode([Span(1, 50, TEXT[50:60], checkpoints=(40, 50))])
        assert stage.memory.checkpoint(1, 39) is None
        found = stage.memory.checkpoint(1, 59)
        assert found is not None
        num_positions, state = found
        assert num_positions == 50
        rows = stage.memory.kv_rows(1)
        # Into another slot, in two pieces: the second takes the place of the first's state.
        other.memory.put_kv_rows(0, rows.cut(0, 30), state)
        other.memory.put_kv_rows(0, rows.cut(30, 50), state)
        assert other.memory.return_points(0) == (0, 50)
        (same,) = other.decode([Span(0, 50, TEXT[50:60])])
        assert np.array_equal(same, further)
        other.memory.trim(0, 50)
        assert np.array_equal(other.decode([Span(0, 50, TEXT[50:60])])[0], further)
        with pytest.raises(UncuttableModel, match="slot 0 cannot go back to position 45"):
            other.memory.trim(0, 45)


def stage_of(name: str, folder: Path) -> Path:
    """The first layers of a tiny model, cut off."""
    path = folder / f"{name}.gguf"
    if name in TINY_FAMILIES:
        TINY_FAMILIES[name].write(path)
        cut = TINY_FAMILIES[name].cuts[0]
    else:
        TinyModel(name, head_size=32, n_layers=3 + len(name) % 2).write(path)
        cut = len(name) % 3 + 1
    stage = folder / f"{name}-stage.gguf"
    cut_stage(path, LayerRange(0, cut), stage)
    return stage
