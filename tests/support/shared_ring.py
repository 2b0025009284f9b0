"""A poisoned fake ring in an event loop of its own, so that tests of many examples can share it."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.fake_stage import FakeRuntime, fake_ring
from tests.support.ring_harness import RunningStage, running_services


@dataclass
class SharedRing:
    runner: asyncio.Runner
    runtimes: list[FakeRuntime]
    stages: list[RunningStage]


@pytest.fixture(scope="module")
def shared_ring() -> Iterator[SharedRing]:
    runtimes = fake_ring(is_poisoned=True)
    with asyncio.Runner() as runner:
        services = running_services(runtimes)
        stages = runner.run(services.__aenter__())
        yield SharedRing(runner, runtimes, stages)
        runner.run(services.__aexit__(None, None, None))
