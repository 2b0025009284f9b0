"""For tests that use this machine's own IPv6 addresses."""

from pathlib import Path

import pytest

needs_ipv6 = pytest.mark.skipif(
    not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6: boot without ipv6.disable=1"
)
