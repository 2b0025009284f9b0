"""Requests for vectors: answered together, cancelled, kept through the loss of a host, or refused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from spanmesh_proto.errors import ClusterError, HostUnreachable, Overloaded, StageFailed
from tests.support.embedders import ScriptedLink, running_engine, vector_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from mesh.embedding.engine import EmbeddingEngine
    from mesh.embedding.link import ComputedBatch

ONE, TWO, THREE = (1, 2, 3), (4, 5), (6,)


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def asked(
    engine: EmbeddingEngine, *texts: tuple[int, ...], client: str | None = None
) -> asyncio.Task[NDArray[np.float32]]:
    return asyncio.create_task(engine.embed(texts, client))


async def under_way(
    engine: EmbeddingEngine, link: ScriptedLink, *texts: tuple[int, ...]
) -> asyncio.Task[NDArray[np.float32]]:
    """A request whose batch waits at the host."""
    num_batches = len(link.batches)
    task = asked(engine, *texts)
    await until(lambda: len(link.batches) > num_batches)
    return task


async def test_each_text_gets_its_own_vector_and_waiting_requests_share_a_batch() -> None:
    link = ScriptedLink()
    async with running_engine() as engine:
        engine.resume(link)
        link.gate.clear()
        # Two batches are under way; what comes meanwhile waits for the third.
        first, second = await under_way(engine, link, ONE), await under_way(engine, link, TWO)
        third, fourth = asked(engine, THREE, ONE), asked(engine, TWO, client="b")
        await until(lambda: engine.num_waiting == 2)
        link.gate.set()
        for task, texts in ((first, [ONE]), (second, [TWO]), (third, [THREE, ONE]), (fourth, [TWO])):
            assert np.array_equal(await task, np.stack([vector_of(text) for text in texts]))
        assert link.batches == [[ONE], [TWO], [THREE, ONE, TWO]]
        assert engine.num_requests == engine.num_waiting == 0
        counts = engine.statistics.counts(engine.num_waiting)
        assert (counts.waiting, counts.requests, counts.batches) == (0, 4, 3)
        assert (counts.texts, counts.tokens) == (5, 3 + 2 + 1 + 3 + 2)
        assert engine.statistics.finished == {"stop": 4}


async def test_a_client_that_leaves_takes_its_texts_with_it() -> None:
    link = ScriptedLink()
    async with running_engine() as engine:
        engine.resume(link)
        link.gate.clear()
        running, waiting = await under_way(engine, link, ONE), await under_way(engine, link, TWO)
        staying, left = asked(engine, THREE), asked(engine, ONE, TWO)
        await until(lambda: engine.num_waiting == 2)
        for task in (running, left):
            task.cancel()
        await until(lambda: link.num_cancelled == 1)
        # Its place is taken by what waited.
        await until(lambda: len(link.batches) == 3)
        link.gate.set()
        assert np.array_equal(await waiting, [vector_of(TWO)])
        assert np.array_equal(await staying, [vector_of(THREE)])
        assert link.batches == [[ONE], [TWO], [THREE]]
        assert engine.statistics.finished == {"stop": 2, "abort": 2}


async def test_a_batch_that_somebody_waits_for_goes_on() -> None:
    link = ScriptedLink()
    async with running_engine() as engine:
        leaving, staying = asked(engine, ONE), asked(engine, TWO)
        for task in (leaving, staying):
            with pytest.raises(ClusterError, match="still loading"):
                await task
        engine.resume(link)
        link.gate.clear()
        engine.suspend()
        leaving, staying = asked(engine, ONE), asked(engine, TWO)
        await until(lambda: engine.num_waiting == 2)
        engine.resume(link)
        await until(lambda: link.batches == [[ONE, TWO]])
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        link.gate.set()
        assert np.array_equal(await staying, [vector_of(TWO)])
        assert link.num_cancelled == 0


async def test_texts_of_a_lost_host_are_computed_by_the_next() -> None:
    lost, next_ = ScriptedLink(), ScriptedLink()
    async with running_engine() as engine:
        engine.resume(lost)
        lost.errors.append(HostUnreachable("attic does not answer"))
        task = asked(engine, ONE, TWO)
        async with asyncio.timeout(10):
            assert (await engine.broken()).message == "attic does not answer"
        assert (engine.is_ready, engine.is_serving) == (False, True)
        engine.suspend()
        engine.resume(next_)
        assert np.array_equal(await task, [vector_of(ONE), vector_of(TWO)])
        assert (lost.batches, next_.batches) == ([[ONE, TWO]], [[ONE, TWO]])
        assert engine.is_ready


async def test_what_fails_twice_is_answered_with_the_error_and_spares_the_others() -> None:
    link = ScriptedLink()
    async with running_engine() as engine:
        engine.resume(link)
        engine.suspend()
        harmful, harmless = asked(engine, ONE), asked(engine, TWO)
        await until(lambda: engine.num_waiting == 2)
        link.errors = [StageFailed("no vector"), StageFailed("no vector")]
        engine.resume(link)
        with pytest.raises(StageFailed, match="failed on these texts: no vector") as failed:
            await harmful
        assert failed.value.retry_after_s
        assert np.array_equal(await harmless, [vector_of(TWO)])
        assert link.batches == [[ONE, TWO], [ONE], [TWO]]
        # The host answers, so it is not replaced.
        assert engine.is_ready
        assert engine.statistics.finished == {"stop": 1, "error": 1}


async def test_a_host_that_never_answers_is_given_up_and_its_texts_with_the_second() -> None:
    bounds = []

    def most_batch_s(num_tokens: int, earlier_tokens: int, _earlier_s: float) -> float:
        bounds.append((num_tokens, earlier_tokens))
        return 0.05

    links = [ScriptedLink(), ScriptedLink()]
    async with running_engine(most_batch_s=most_batch_s) as engine, asyncio.timeout(10):
        for link in links:
            link.gate.clear()
        engine.resume(links[0])
        first, second = await under_way(engine, links[0], ONE), await under_way(engine, links[0], TWO)
        for link in links:
            engine.resume(link)
            fault = await engine.broken()
            assert isinstance(fault, StageFailed), "another connection to it does not help"
            assert not engine.is_ready
        await until(lambda: [link.num_cancelled for link in links] == [2, 2])
        for request in (first, second):
            with pytest.raises(StageFailed, match="does not end a batch") as failed:
                await request
            assert failed.value.retry_after_s
        assert (engine.num_requests, engine.num_waiting) == (0, 0)
        # The host computes both, one after the other.
        assert bounds[-1][0] in {len(ONE), len(TWO)}
        assert (len(ONE) + len(TWO), 0) in bounds
        links[1].gate.set()
        engine.resume(links[1])
        assert np.array_equal(await engine.embed([THREE]), [vector_of(THREE)])


async def test_a_batch_has_its_time_from_the_one_before_it_on() -> None:
    link, slow = ScriptedLink(), asyncio.Event()

    async def one_of_two(texts: Sequence[Sequence[int]]) -> ComputedBatch:
        if tuple(texts[0]) == TWO:
            await slow.wait()
        else:
            await asyncio.sleep(1.2)
            asyncio.get_running_loop().call_later(1.2, slow.set)
        return await ScriptedLink.embed(link, texts)

    link.embed = one_of_two  # type: ignore[method-assign]
    async with running_engine(most_batch_s=lambda *_told: 2.0) as engine, asyncio.timeout(10):
        engine.resume(link)
        first = asked(engine, ONE)
        await until(lambda: engine.num_requests and not engine.num_waiting)
        await asyncio.gather(first, asked(engine, TWO))
        assert engine.is_ready
        assert engine.statistics.num_batches == 2


async def test_requests_wait_for_a_while_and_are_refused_from_then_on() -> None:
    link = ScriptedLink()
    async with running_engine(patience_s=0.05) as engine:
        engine.resume(link)
        engine.suspend()
        with pytest.raises(ClusterError, match="loaded on another host") as refused:
            await engine.embed([ONE])
        assert refused.value.retry_after_s
        with pytest.raises(ClusterError, match="loaded on another host"):
            await engine.embed([ONE])
        engine.resume(link)
        assert np.array_equal(await engine.embed([ONE]), [vector_of(ONE)])


async def test_where_no_host_can_hold_it_the_reason_is_told() -> None:
    link = ScriptedLink()
    async with running_engine() as engine:
        engine.resume(link)
        engine.suspend()
        waiting = asked(engine, ONE)
        await until(lambda: engine.num_waiting)
        engine.give_up(StageFailed("it needs 9.0 GiB", retry_after_s=10))
        for call in (waiting, asked(engine, TWO)):
            with pytest.raises(StageFailed, match=r"it needs 9.0 GiB"):
                await call
        assert link.batches == []


async def test_a_full_queue_refuses_with_when_to_come_back() -> None:
    link = ScriptedLink()
    async with running_engine(max_waiting=2) as engine:
        engine.resume(link)
        link.gate.clear()
        running = [await under_way(engine, link, ONE), await under_way(engine, link, ONE)]
        waiting = [asked(engine, TWO), asked(engine, TWO)]
        await until(lambda: engine.num_waiting == 2)
        with pytest.raises(Overloaded, match="2 requests for vectors wait") as refused:
            await engine.embed([THREE])
        assert refused.value.retry_after_s
        # Another client may always have one.
        other = asked(engine, THREE, client="b")
        await until(lambda: engine.num_waiting == 3)
        link.gate.set()
        await asyncio.gather(*running, *waiting, other)
