"""How what a document records is held against what is printed."""

import pytest

from tests.support.walk_through import THREE_HOSTS, Step, differences, steps_of

RECORDED = ("host  ┃ layers", "━━━━", "│ alpha │ [0, 12), [12, 30) │", "took 3.4 s", "key sk-…")


def test_numbers_hosts_and_widths_may_differ() -> None:
    printed = "host ┃ layers\n━━━━━━━━\n\n│ beta    │ [0, 7) │\ntook 12 s\nkey sk-abc\n"
    assert differences(RECORDED, printed) == []


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        ("one\n", ["no longer printed: two 2"]),
        ("one\ntwo 5\nthree\n", ["not in the document: three"]),
        ("one\ntwo in all\n", ["no longer printed: two 2", "not in the document: two in all"]),
    ],
)
def test_words_may_not(printed: str, found: list[str]) -> None:
    assert differences(("one", "two 2"), printed) == found


def test_what_was_left_out_may_be_anything() -> None:
    assert differences(("one", "…"), "one\ntwo\n") == []
    assert differences(("one", "…"), "two\n") == ["no longer printed: one"]


def test_all_that_the_walk_through_has_typed_is_answered() -> None:
    steps = steps_of(THREE_HOSTS)
    assert [step.command.split()[1] for step in steps if step.command.startswith("mesh ")] == [
        "certify", "slice", "keys", "serve", "join", "status", "drain", "status", "evict", "status"
    ]  # fmt: skip
    assert [step.command for step in steps if not step.recorded] == []
    assert steps[1] == Step(
        "Before",
        "mesh slice model.gguf --layers 0:10 -o share.gguf",
        ("share.gguf: layers [0, 10) of model.gguf, 52,255,808 bytes",),
    )
