"""Names of blocks: one for each text, key and ring, whoever computes them and however far."""

from __future__ import annotations

from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.disk_prefixes import BlockNames, names_root

SIZE: Final = 4
IDENTITIES: Final = (bytes(32), bytes(range(32)))
texts = st.lists(st.integers(0, 5), max_size=24).map(tuple)
roots = st.sampled_from(
    [
        names_root(client, identities, wires)
        for client in (None, "", "ann", "bob")
        for identities in (IDENTITIES, IDENTITIES[::-1], (IDENTITIES[0], IDENTITIES[0]))
        for wires in (("f32",), ("q8",))
    ]
)


def all_names(root: bytes, text: tuple[int, ...]) -> dict[tuple[str, int], bytes]:
    names = BlockNames(root, text, SIZE)
    blocks = {("rows", index): names.block(index) for index in range(names.num_blocks)}
    return blocks | {("state", stop): names.state(stop) for stop in range(1, len(text) + 1)}


@given(one=texts, other=texts, root=roots, other_root=roots)
def test_a_name_stands_for_a_key_a_ring_and_a_text(
    one: tuple[int, ...], other: tuple[int, ...], root: bytes, other_root: bytes
) -> None:
    first, second = all_names(root, one), all_names(other_root, other)
    assert len({*first.values(), root}) == len(first) + 1, "two blocks of one name"
    for key, name in first.items():
        kind, number = key
        stop = (number + 1) * SIZE if kind == "rows" else number
        is_same = root == other_root and stop <= len(other) and one[:stop] == other[:stop]
        assert (name == second.get(key)) == is_same
        assert is_same or name not in second.values()


def test_all_that_a_root_is_made_of_tells() -> None:
    roots = {
        names_root(client, identities, wires)
        for client in (None, "", "f32", "ann")
        for identities in (IDENTITIES, IDENTITIES[::-1])
        for wires in (("f32",), ("f16",))
    }
    assert len(roots) == 16
    assert names_root("ann", IDENTITIES, ["f32"]) == names_root("ann", list(IDENTITIES), ("f32",))


@given(text=texts, root=roots, data=st.data())
def test_names_are_the_same_in_any_order_of_asking(
    text: tuple[int, ...], root: bytes, data: st.DataObject
) -> None:
    expected = all_names(root, text)
    names = BlockNames(root, text, SIZE)
    for kind, number in data.draw(st.permutations(sorted(expected))):
        name = names.block(number) if kind == "rows" else names.state(number)
        assert name == expected[kind, number]


def test_the_block_of_a_state_ends_with_it() -> None:
    names = BlockNames(bytes(32), tuple(range(20)), SIZE)
    assert [names.start_of_state(stop) for stop in (1, 4, 5, 8, 9)] == [0, 0, 4, 4, 8]
