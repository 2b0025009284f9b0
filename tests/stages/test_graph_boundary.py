"""Where hidden states enter and leave, as a stage file tells it."""

import pytest

from stages.graph_boundary import GraphBoundary


@pytest.mark.parametrize(
    ("handover", "num_keys"),
    [
        (GraphBoundary(64), 0),
        (GraphBoundary(64, inlet="embd"), 1),
        (GraphBoundary(256, outlet="l_last", inlet="hc_init", takes_tokens=True), 4),
        (GraphBoundary(64, inlet="l_out-1", blanks_before=2, blanks_after=1), 3),
        (GraphBoundary(64, takes_tokens=True, takes_rows=True, hands_on_rows=True), 3),
        (GraphBoundary(64, marks_all_rows=True), 1),
        (GraphBoundary(64, barred_from=4, barred_to=8196), 2),
    ],
)
def test_a_file_says_what_is_unusual_and_nothing_else(handover: GraphBoundary, num_keys: int) -> None:
    metadata = handover.to_metadata(64)
    assert len(metadata) == num_keys
    # llama.cpp gives every value as text.
    texts = {
        key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in metadata.items()
    }
    assert GraphBoundary.from_metadata(texts.get, 64) == handover


def test_layers_are_counted_behind_blanks() -> None:
    assert GraphBoundary(64, blanks_before=2).outlet_of(1) == "l_out-3"
