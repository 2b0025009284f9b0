"""The table of request fields in docs/api.md is that of the code."""

from pathlib import Path

from tests.contracts.field_table import rewritten

PAGE = Path(__file__).parents[2] / "docs/api.md"


def test_the_table_of_fields_is_written_from_the_code() -> None:
    page = PAGE.read_text()
    assert "<!-- fields -->\n\n| endpoint |" in page
    assert rewritten(page) == page, "run: python -m tests.contracts.field_table docs/api.md"
