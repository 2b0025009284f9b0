"""What every test on a lab does first."""

import os

import pytest

from meshbench.lab.network import lab_supported


def require_lab(*, is_ipv6: bool = False) -> None:
    """Skip with the reason where a lab cannot be; on CI that is a failure, so that it cannot go unnoticed."""
    reason = lab_supported(is_ipv6=is_ipv6)
    if reason is not None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
