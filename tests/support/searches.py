"""How many cases a search tries: some in `make test`, all in `make sweep`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable

# Of hypothesis: `make sweep` asks for it.
SWEEP: Final = "sweep"


def search(few: int, many: int) -> Callable[[Any], Any]:
    """Decorates a test of hypothesis whose cases are costly.

    Args:
        few: Cases that `make test` tries: other ones each time.
        many: Cases that `make sweep` tries.
    """
    tried = settings(
        max_examples=many if settings.get_current_profile_name() == SWEEP else few,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    return lambda test: pytest.mark.searched(tried(test))
