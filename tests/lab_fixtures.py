"""What every test on a lab does first."""

import os

import pytest

from mesh.lab import lab_supported


def require_lab() -> None:
    """Skip with the reason where a lab cannot be; on CI that is a failure, so that it cannot go unnoticed."""
    reason = lab_supported()
    if reason is not None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
