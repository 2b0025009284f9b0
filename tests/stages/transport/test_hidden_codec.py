"""Hidden states as bytes: how near they come back, how long they are, what they depend on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from spanmesh_proto.errors import StageFailed
from stages.transport import hidden_codec
from stages.transport.hidden_codec import BLOCK_WIDTH, HiddenType, decode, encode, encode_by_arrays

SMALLER = (HiddenType.F16, HiddenType.Q8)
Hidden = NDArray[np.float32]


def hidden_states(largest: float = 2.0**100) -> st.SearchStrategy[Hidden]:
    """A few rows, widths that are whole numbers of blocks and others, values of very different sizes."""
    shapes = st.tuples(st.integers(1, 4), st.sampled_from((1, 32, 33, 80)))
    return arrays(np.float32, shapes, elements=st.floats(-largest, largest, width=32), fill=st.just(0.5))


def there_and_back(hidden: Hidden, hidden_type: HiddenType) -> Hidden:
    return decode(encode(hidden, hidden_type), hidden_type, hidden.shape[1])


@given(arrays(np.uint32, (3, 40)))
def test_f32_keeps_every_bit_of_anything(bits: NDArray[np.uint32]) -> None:
    assert there_and_back(bits.view(np.float32), HiddenType.F32).tobytes() == bits.tobytes()


@given(hidden_states())
def test_f16_rounds_and_saturates(hidden: Hidden) -> None:
    back = there_and_back(hidden, HiddenType.F16)
    within = np.clip(hidden, -65504, 65504).astype(np.float64)
    assert np.isfinite(back).all()
    # Half a unit in the last of 11 bits, or of the smallest numbers that there are.
    assert (np.abs(back - within) <= np.maximum(np.abs(within) * 2.0**-11, 2.0**-25)).all()


@given(hidden_states())
def test_q8_is_within_half_a_step_of_each_block(hidden: Hidden) -> None:
    back = there_and_back(hidden, HiddenType.Q8)
    assert np.isfinite(back).all()
    for start in range(0, hidden.shape[1], BLOCK_WIDTH):
        block = np.s_[:, start : start + BLOCK_WIDTH]
        largest = np.abs(hidden[block]).max(axis=1, keepdims=True).astype(np.float64)
        # A scale in two bytes is up to 1/128 above what it would be in four.
        half_step = largest / 127 / 2 * (1 + 2**-7) * (1 + 2**-20) + 2.0**-133
        assert (np.abs(back[block].astype(np.float64) - hidden[block]) <= half_step).all()


@pytest.mark.parametrize("hidden_type", HiddenType)
@given(hidden=hidden_states())
def test_a_row_is_encoded_by_itself(hidden_type: HiddenType, hidden: Hidden) -> None:
    rows = [encode(hidden[index : index + 1], hidden_type) for index in range(len(hidden))]
    assert encode(hidden, hidden_type) == b"".join(rows)
    assert {len(row) for row in rows} == {hidden_type.row_bytes(hidden.shape[1])}


@pytest.mark.parametrize("hidden_type", HiddenType)
@given(hidden=hidden_states())
def test_what_came_through_once_comes_through_again(hidden_type: HiddenType, hidden: Hidden) -> None:
    once = there_and_back(hidden, hidden_type)
    twice = there_and_back(once, hidden_type)
    if hidden_type is HiddenType.Q8:
        # The largest value of a block may have become the scale's 126th multiple.
        np.testing.assert_allclose(twice, once, rtol=0, atol=np.abs(once).max() / 120)
    else:
        np.testing.assert_array_equal(twice, once)


def test_sizes_of_a_row() -> None:
    sizes = {hidden_type: hidden_type.row_bytes(576) for hidden_type in HiddenType}
    assert sizes == {"f32": 2304, "f16": 1152, "q8": 612}
    # A short last block has a scale too.
    assert HiddenType.Q8.row_bytes(33) == 33 + 2 * 2


def test_rows_of_any_memory_order() -> None:
    hidden = np.arange(240, dtype=np.float32).reshape(40, 6).T
    for hidden_type in HiddenType:
        assert encode(hidden, hidden_type) == encode(np.ascontiguousarray(hidden), hidden_type)


def test_zeros_and_the_smallest_numbers() -> None:
    smallest = np.float32(1e-45)
    hidden = np.array([[0.0] * 32 + [smallest] * 32, [-0.0] * 64], np.float32)
    for hidden_type in HiddenType:
        assert np.abs(there_and_back(hidden, hidden_type)).max() <= smallest


@pytest.mark.parametrize("hidden_type", SMALLER)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_is_named(hidden_type: HiddenType, value: float) -> None:
    hidden = np.ones((3, 40), np.float32)
    hidden[1, 37] = value
    with pytest.raises(
        StageFailed, match=f"value 37 of row 1 of the hidden states is {value}: {hidden_type} carries"
    ):
        encode(hidden, hidden_type)


def test_is_compiled_where_the_tests_run() -> None:
    assert hidden_codec._compiled() is not None


def finite_values() -> st.SearchStrategy[Hidden]:
    """Any finite numbers, by their bits: subnormal ones and the largest as often as others."""
    shapes = st.tuples(st.integers(1, 3), st.sampled_from((1, 32, 33, 80)))

    def values(bits: NDArray[np.uint32]) -> Hidden:
        found = bits.view(np.float32)
        return np.where(np.isfinite(found), found, np.float32(65504.0))

    return arrays(np.uint32, shapes, elements=st.integers(0, 2**32 - 1)).map(values)


@pytest.mark.parametrize("hidden_type", SMALLER)
@given(hidden=finite_values() | hidden_states())
def test_compiled_bytes_are_those_of_arrays(hidden_type: HiddenType, hidden: Hidden) -> None:
    assert encode(hidden, hidden_type) == encode_by_arrays(hidden, hidden_type)


def test_every_half_and_its_neighbours_round_as_in_arrays() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    exact = halves[np.isfinite(halves)].astype(np.float32)
    between = (exact[1:] + exact[:-1]) / 2
    below, above = np.nextafter(between, np.float32(-np.inf)), np.nextafter(between, np.float32(np.inf))
    for values in (exact, between, below, above):
        hidden = np.asarray(values, np.float32).reshape(1, -1)
        assert encode(hidden, HiddenType.F16) == encode_by_arrays(hidden, HiddenType.F16)


@given(rows=st.integers(0, 3), width=st.sampled_from((1, 32, 33, 80)), data=st.data())
def test_compiled_values_of_any_bytes_are_those_of_arrays(rows: int, width: int, data: st.DataObject) -> None:
    num_bytes = rows * HiddenType.Q8.row_bytes(width)
    encoded = data.draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    values = decode(encoded, HiddenType.Q8, width)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = hidden_codec._dequantised(encoded, width)
    np.testing.assert_array_equal(values, expected)
    assert values.shape == (rows, width)
    assert not values.flags.writeable


def test_arrays_take_over_where_nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = np.random.default_rng(1).normal(size=(3, 80)).astype(np.float32)
    compiled = {hidden_type: encode(hidden, hidden_type) for hidden_type in HiddenType}
    hidden_codec._compiled.cache_clear()
    monkeypatch.setattr(hidden_codec, "_EXTENSION", "stages._absent")
    try:
        for hidden_type, encoded in compiled.items():
            assert encode(hidden, hidden_type) == encoded
            assert there_and_back(hidden, hidden_type).shape == hidden.shape
    finally:
        hidden_codec._compiled.cache_clear()
