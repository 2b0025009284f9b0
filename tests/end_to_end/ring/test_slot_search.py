"""A search for schedules after which a slot does not hold what is believed, or an answer is wrong.

Hypothesis plays clients, network, processors and misfortune: nothing happens but what it lets happen, see
`tests.support.gated_ring`. A counterexample is a list of calls of rules. In between it says what each has let
happen: which message passed from where to where, and which stage computed which positions of which slot. The
    same
calls give the same run. So to look at one closer, call the rules on a `SlotMachine` by hand, with the
arguments given, within `watched` as in the test below.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest
from hypothesis import HealthCheck, currently_in_test_context, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import GenerationRequest
from speculative.controller import ControllerOptions
from tests.support.disks import block_files, damage
from tests.support.fake_stage import FakeRuntime, plain_answer
from tests.support.gated_ring import GatedRing, watched
from tests.support.gates import Choice, StillLoop
from tests.support.proposers import Oracle, Parrot
from tests.support.repairable_ring import NUM_STAGES
from tests.support.ring_harness import plugs_for
from tests.support.searches import SWEEP

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from speculative.proposer import Proposer

N_VOCAB: Final = 64
MOST_TOKENS: Final = 12
MOST_ASKING: Final = 6
STAGES: Final = st.integers(0, NUM_STAGES - 1)
BLOCK_POSITIONS: Final = 8
_NEWS_S: Final = 0.6
# Texts that begin alike, for different lengths, and one that does not. Their beginnings are prompts; of the
# longest ones stages keep states on the way.
_COMMON: Final = tuple((7 * place) % 60 + 1 for place in range(24))
TEXTS: Final = (
    _COMMON + tuple((11 * place + 3) % 60 + 1 for place in range(80)),
    _COMMON + tuple((13 * place + 5) % 60 + 1 for place in range(40)),
    _COMMON[:12] + tuple((17 * place + 9) % 60 + 1 for place in range(52)),
    tuple((19 * place + 11) % 60 + 1 for place in range(104)),
)
PROMPTS: Final = st.builds(
    lambda text, length, last: (*text[:length], *last),
    st.sampled_from(TEXTS),
    st.integers(8, 60) | st.integers(64, 100),
    st.lists(st.integers(0, N_VOCAB - 1), max_size=1),
)
REQUESTS: Final = st.builds(
    GenerationRequest,
    PROMPTS,
    st.integers(1, MOST_TOKENS),
    client=st.sampled_from(["ann", "ann", "bob"]),
    uses_cache=st.sampled_from([True, True, True, False]),
)


@functools.cache
def expected(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What follows a prompt, computed from scratch: as much as any request here wants."""
    return tuple(plain_answer(prompt, MOST_TOKENS, lambda logits, _position: int(logits.argmax())))


class Asking:
    """A request and whoever reads its answer.

    Args:
        coordinator: Asked.
        request: What is asked.
        earlier: Texts of the same client that were asked for before.
    """

    def __init__(
        self, coordinator: Coordinator, request: GenerationRequest, earlier: Sequence[tuple[int, ...]]
    ) -> None:
        self.request = request
        self.most_cached = max((num_common(request.prompt, text) for text in earlier), default=0)
        self.num_cached = 0
        self.tokens: list[int] = []
        self.has_hung_up = False
        self.task = asyncio.get_running_loop().create_task(self._read(coordinator))

    async def _read(self, coordinator: Coordinator) -> None:
        async with contextlib.aclosing(coordinator.generate(self.request)) as parts:
            async for part in parts:
                self.tokens += part.tokens
                self.num_cached = part.stats.num_cached

    def check(self) -> None:
        """Fail if what was read is not how the text goes on, or it ended otherwise than it should."""
        wanted = list(expected(self.request.prompt))[: self.request.max_tokens]
        assert self.tokens == wanted[: len(self.tokens)], "a wrong text"
        assert self.num_cached <= self.most_cached, "it begins with what another key asked"
        if self.task.done() and not self.has_hung_up:
            self.task.result()
            assert self.tokens == wanted, "half a text"


def say(choice: Choice) -> None:
    """Tell what happens next, to whoever reads a counterexample."""
    if currently_in_test_context():
        note(f"    {choice.name()}")


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def proposers(kind: str) -> Callable[[GenerationRequest], Sequence[Proposer]] | None:
    match kind:
        case "parrot":
            return lambda _request: [Parrot()]
        case "oracle":
            return lambda request: [Oracle([*request.prompt, *expected(request.prompt)])]
        case "errs":
            return lambda request: [
                Oracle([*request.prompt, *expected(request.prompt)], [False, False, True, False, False])
            ]
    return None


class SlotMachine(RuleBasedStateMachine):
    """The rules: what clients, network, stages and misfortune can do."""

    loop: ClassVar[StillLoop]
    ring_now: ClassVar[GatedRing | None] = None
    num_steps: ClassVar[int] = 0
    num_runs: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.ring: GatedRing
        self.coordinator: Coordinator
        self.asking: list[Asking] = []
        self.work: asyncio.Task[None] | None = None
        # Whether a coordinator has ended whose follower does not serve yet.
        self.is_taken_over = False
        self.has_failed = False
        self.disk_root: Path | None = None
        self.folder = tempfile.TemporaryDirectory()
        # By client: what was asked and how it goes on.
        self.texts: dict[str | None, list[tuple[int, ...]]] = {}
        SlotMachine.num_runs += 1

    def do(self, what: Coroutine[Any, Any, Any]) -> None:
        """Run the loop until that is done and all is quiet."""

        async def done() -> None:
            await what
            await self.ring.quiet()

        try:
            self.loop.run_until_complete(done())
        except BaseException:
            self.has_failed = True
            raise

    def stepped(self, what: Coroutine[Any, Any, Any]) -> None:
        SlotMachine.num_steps += 1
        self.do(what)

    @initialize(
        num_slots=st.sampled_from([2, 3]),
        proposer=st.sampled_from(["none", "parrot", "oracle", "errs"]),
        width=st.integers(1, 4),
        depth=st.integers(1, 4),
        is_followed=st.booleans(),
        is_calm=st.sampled_from([True, True, False]),
        has_disks=st.booleans(),
        num_checkpoints=st.sampled_from([0, 0, 1, 1, 2, 5]),
        most_sent_rows=st.sampled_from([1000, 100, 40]),
    )
    def serve(
        self,
        *,
        num_slots: int,
        proposer: str,
        width: int,
        depth: int,
        is_followed: bool,
        is_calm: bool,
        has_disks: bool,
        num_checkpoints: int = 0,
        most_sent_rows: int = 1000,
    ) -> None:
        """Stages have recurrent state if they have checkpoints, and keep so much of what they sent."""
        self.disk_root = Path(self.folder.name) if has_disks else None
        # What slots hold becomes interesting where rings last; what cannot go back, where they break.
        self.is_calm = is_calm and not num_checkpoints
        self.options = CoordinatorOptions(
            128,
            num_slots,
            FakeRuntime.max_rows,
            N_VOCAB,
            controller=ControllerOptions(fixed_width=width, fixed_depth=depth),
            repair_wait_s=math.inf,
            # Here stages die without any session's doing.
            most_crashes=99,
            # What is lost is said by the end of its streams.
            ping_interval_s=1e9,
            ping_timeout_s=1e9,
            can_trim=not num_checkpoints,
        )
        self.num_checkpoints = num_checkpoints
        self.make_proposers = proposers(proposer)

        async def begin() -> None:
            self.ring = SlotMachine.ring_now = GatedRing(
                num_slots=num_slots,
                is_followed=is_followed,
                disk_root=self.disk_root,
                num_checkpoints=num_checkpoints,
                most_sent_bytes=4 * most_sent_rows,
            )
            await self.ring.fill()
            await self.coordinate()
            if self.disk_root is not None:
                # Disks are of use once all stages have told theirs.
                await self._let_all()

        async def begun() -> None:
            await begin()
            await self.ring.quiet()

        self.loop.run_until_complete(begun())

    async def coordinate(self) -> None:
        """Start a coordinator over the ring as it is."""
        ring = self.ring
        self.coordinator = ring.coordinator = Coordinator(
            [stage.address for stage in ring.running],
            self.options,
            plugs=plugs_for(num_checkpoints=self.num_checkpoints, block_positions=BLOCK_POSITIONS),
            mesh_id=ring.mesh_id,
            mesh_key=ring.mesh_key,
            make_proposers=self.make_proposers,
            clock_s=self.loop.time,
            term=ring.term,
        )
        await self.coordinator.start()

    # Clients.

    @precondition(lambda self: len(self.asking) < MOST_ASKING and not self.is_taken_over)
    @rule(request=REQUESTS)
    def ask(self, request: GenerationRequest) -> None:
        self.stepped(self._ask(request))

    async def _ask(self, request: GenerationRequest) -> None:
        texts = self.texts.setdefault(request.client, [])
        self.asking.append(Asking(self.coordinator, request, texts))
        texts.append((*request.prompt, *expected(request.prompt)))

    @precondition(lambda self: len(self.asking) < MOST_ASKING and not self.is_taken_over)
    @rule(request=REQUESTS, picks=st.lists(st.integers(0, 11), max_size=4))
    def ask_in_vain(self, request: GenerationRequest, picks: list[int]) -> None:
        """A client that hangs up soon."""

        async def ask() -> None:
            await self._ask(request)
            await self._let(picks)
            await self.ring.quiet()
            await self._hang_up(self.asking[-1])

        self.stepped(ask())

    @precondition(lambda self: self.asking)
    @rule(which=st.integers(0, 5))
    def hang_up(self, which: int) -> None:
        self.stepped(self._hang_up(self.asking[which % len(self.asking)]))

    @staticmethod
    async def _hang_up(asking: Asking) -> None:
        asking.has_hung_up = True
        asking.task.cancel()

    # Network and processors.

    @precondition(lambda self: not self.ring.is_clear)
    @rule(picks=st.lists(st.integers(0, 11), min_size=1, max_size=6))
    def let(self, picks: list[int]) -> None:
        """Let messages pass and batches be computed, one after another."""
        self.stepped(self._let(picks))

    async def _let(self, picks: list[int]) -> None:
        for pick in picks:
            await self.ring.quiet()
            if choices := self.ring.choices():
                choice = choices[pick % len(choices)]
                say(choice)
                await choice.happen()

    @precondition(lambda self: not self.ring.is_clear)
    @rule(which=st.sampled_from([0, -1]))
    def let_all(self, which: int) -> None:
        """Let everything happen until nothing is left to: what is first in order first, or last."""
        self.stepped(self._let_all(which))

    async def _let_all(self, which: int = 0) -> None:
        await self.ring.quiet()
        while choices := self.ring.choices():
            say(choices[which])
            await choices[which].happen()
            await self.ring.quiet()

    @precondition(lambda self: self.disk_root is not None and bool(block_files([self.disk_root])))
    @rule(
        which=st.integers(0, 100),
        how=st.sampled_from(["flip", "flip", "cut", "grow", "swap", "remove"]),
        at=st.integers(0, 10_000),
    )
    def harm(self, which: int, how: str, at: int) -> None:
        """A block on disk is damaged, or gone."""
        assert self.disk_root is not None
        files = block_files([self.disk_root])
        damage(files[which % len(files)], how, at)

    # Time, misfortune and orders: one rule, as they are rarer than all else.

    @precondition(lambda self: not self.is_calm)
    @rule(what=st.sampled_from(["time", "time", "loss", "move", "planned move", "takeover"]), stage=STAGES)
    def befall(self, what: str, stage: int) -> None:
        if what == "time":
            # Copies are told what is new.
            self.stepped(self.ring.pass_time(_NEWS_S))
        elif self.is_at_work:
            return
        elif what == "loss":
            self.stepped(self.ring.kill(stage))
        elif what == "takeover":
            self.stepped(self._begin_takeover())
        else:
            self.stepped(self._begin_move(is_planned=what == "planned move"))

    async def _begin_move(self, *, is_planned: bool = False) -> None:
        """Make the ring anew, with what is left of it: a repair, or a move if nothing is lost."""
        if is_planned:
            self.coordinator.pause("stages move")
        self.work = asyncio.create_task(self.ring.repair())

    async def _begin_takeover(self) -> None:
        """The coordinator's process dies, and another takes its stages, whose sessions count from 1 again."""
        self.ring.end_calls_of("coordinator")
        for asking in self.asking:
            await self._hang_up(asking)
        await self.ring.quiet()
        await self.coordinator.stop()
        self.is_taken_over = True
        self.work = asyncio.create_task(self._take_over())

    async def _take_over(self) -> None:
        self.ring.term += 1
        await self.ring.fill()
        await self.coordinate()
        self.is_taken_over = False

    @property
    def is_at_work(self) -> bool:
        """Whether a ring is being made anew: it waits for batches that compute."""
        return self.work is not None and not self.work.done()

    # What must hold.

    @invariant()
    def texts_are_right(self) -> None:
        if self.has_failed or not hasattr(self, "ring"):
            return
        try:
            for asking in self.asking:
                asking.check()
            self.asking = [asking for asking in self.asking if not asking.task.done()]
            if self.work is not None and self.work.done():
                self.work.result()
                self.work = None
            if self.coordinator.is_ready and self.work is None:
                self._check_slots()
                if self.ring.is_clear:
                    self._check_sessions()
        except BaseException:
            self.has_failed = True
            raise

    def _check_sessions(self) -> None:
        """Nothing is under way: what runs here runs at every stage, and nothing else does."""
        wanted = {session.id for session in self.coordinator._sessions.values()}
        for index, stage in enumerate(self.ring.running):
            assert set(stage.service._engine.sessions.slots) == wanted, f"sessions open at stage {index}"

    def _check_slots(self) -> None:
        """What the coordinator counts as cached of a slot, every stage holds, whatever is still under way.

        Where a free slot can go back to, too; a session that runs may drop checkpoints with its next window.
        """
        in_use = {session.slot for session in self.coordinator._sessions.values()}
        for slot, cached in self.coordinator._slots.prefix_cache._cached.items():
            believed = cached.tokens.tolist()
            points = () if slot in in_use else cached.return_points
            for index, stage in enumerate(self.ring.running):
                held = stage.service._engine.slots.tokens.tokens(slot).tolist()
                assert held[: len(believed)] == believed, f"slot {slot} of stage {index}"
                runtime = stage.service._engine.slots.runtime
                for point in points:
                    assert runtime.memory.can_go_back(slot, point), f"slot {slot} of stage {index} to {point}"

    def teardown(self) -> None:
        with self.folder:
            self._tear_down()

    def _tear_down(self) -> None:
        if not hasattr(self, "ring"):
            return
        try:
            if not self.has_failed:
                self.do(self._let_all())
                self.texts_are_right()
                assert not self.is_at_work, f"a ring is never made anew: {self.work}"
                if not self.coordinator.is_ready:
                    self.do(self._begin_move())
                    self.do(self._let_all())
                    self.texts_are_right()
                assert not self.asking, "requests that are never answered"
                assert not self.coordinator.num_requests
                assert not any(len(stage.service._engine._scheduler) for stage in self.ring.running)
        finally:
            self.loop.run_until_complete(self._close())

    async def _close(self) -> None:
        ring = self.ring
        if self.work is not None:
            self.work.cancel()
        for asking in self.asking:
            asking.task.cancel()
        await asyncio.gather(*(asking.task for asking in self.asking), return_exceptions=True)
        await self.coordinator.stop()
        await ring.close()
        await ring.quiet()
        SlotMachine.ring_now = None


@pytest.fixture
def still_loop(monkeypatch: pytest.MonkeyPatch) -> Any:
    loop = SlotMachine.loop = StillLoop()
    with watched(monkeypatch, lambda: SlotMachine.ring_now):
        yield loop
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@pytest.mark.searched
def test_slots_hold_what_is_believed_and_every_text_is_right(
    still_loop: StillLoop, capsys: pytest.CaptureFixture[str]
) -> None:
    is_sweep = settings.get_current_profile_name() == SWEEP
    try:
        run_state_machine_as_test(
            SlotMachine,
            settings=settings(
                max_examples=650 if is_sweep else 25,
                stateful_step_count=50,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        with capsys.disabled():
            print(f"\n{SlotMachine.num_steps} steps in {SlotMachine.num_runs} runs")


# What can go wrong with sessions that cannot go back, each by hand.

LONG: Final = tuple((7 * place) % 60 + 1 for place in range(108))
OTHER: Final = tuple((13 * place) % 60 + 2 for place in range(108))
LIKE_LONG: Final = (*LONG[:20], *OTHER[20:])


def recurrent(
    *,
    num_slots: int,
    most_sent_rows: int,
    is_followed: bool = False,
    proposer: str = "none",
    depth: int = 1,
    num_checkpoints: int = 2,
) -> SlotMachine:
    machine = SlotMachine()
    machine.serve(
        num_slots=num_slots,
        proposer=proposer,
        width=1,
        depth=depth,
        is_followed=is_followed,
        is_calm=False,
        has_disks=False,
        num_checkpoints=num_checkpoints,
        most_sent_rows=most_sent_rows,
    )
    return machine


async def let_pass(
    machine: SlotMachine, held: Callable[[str], bool], is_enough: Callable[[], bool] = lambda: False
) -> None:
    """Let everything happen whose name is not to be held, until it is enough or nothing is left to."""
    await machine.ring.quiet()
    while not is_enough():
        choices = [choice for choice in machine.ring.choices() if not held(choice.name())]
        if not choices:
            return
        await choices[0].happen()
        await machine.ring.quiet()


def test_a_replay_whose_sent_rows_make_room_for_others_begins_anew(still_loop: StillLoop) -> None:
    """A first stage lacks them from the middle on, where it cannot go back to."""
    machine = recurrent(num_slots=2, most_sent_rows=128)
    machine.ask(GenerationRequest(LONG, MOST_TOKENS))
    machine.do(let_pass(machine, lambda _name: False, lambda: machine.ring.furthest() >= 3))
    machine.do(machine.ring.kill(1))
    machine.do(machine._begin_move())
    # As many chunks as there may be at once are sent; the next one leaves with a verdict.
    machine.do(let_pass(machine, lambda name: "verdict on" in name))
    sent = machine.ring.running[0].service._engine.slots.sent
    assert sent.num_rows(0, 4) > len(LONG)
    machine.ask(GenerationRequest(OTHER, MOST_TOKENS))
    machine.do(let_pass(machine, lambda name: "verdict on" in name))
    assert sent.num_rows(0, 4) == 0
    machine.let_all(0)
    machine.texts_are_right()
    assert machine.coordinator.status().prefix_mismatches == 1
    machine.teardown()


def test_a_copy_with_the_rows_of_the_session_before_begins_anew(still_loop: StillLoop) -> None:
    """It was told of the next one in its slot, but not yet the state; both texts begin alike."""
    machine = recurrent(num_slots=1, most_sent_rows=1000, is_followed=True)
    machine.ask(GenerationRequest(LONG, MOST_TOKENS))
    machine.do(let_pass(machine, lambda _name: False, lambda: machine.ring.furthest() >= 3))
    machine.do(machine.ring.pass_time(_NEWS_S))
    machine.let_all(0)
    copy = machine.ring.copies[1]
    assert copy is not None
    told = copy.service._engine.slots.tokens
    num_told = told.length(0)
    assert num_told >= len(LIKE_LONG) - 10
    machine.ask(GenerationRequest(LIKE_LONG, MOST_TOKENS, uses_cache=False))
    machine.do(let_pass(machine, lambda _name: False, lambda: machine.ring.furthest() >= 3))
    machine.do(machine.ring.pass_time(_NEWS_S))
    # A state is a message without tokens.
    machine.do(
        let_pass(
            machine,
            lambda name: name.startswith("Follow") and name.endswith(" 0 tokens"),
            lambda: copy.service._engine.sessions._latest.get(0) == 2,
        )
    )
    assert tuple(told.tokens(0)[:num_told]) == (*LONG, *expected(LONG))[:num_told]
    machine.do(machine.ring.kill(1))
    machine.do(machine._begin_move())
    machine.let_all(0)
    machine.texts_are_right()
    assert machine.coordinator.status().prefix_mismatches == 1
    machine.teardown()


@pytest.mark.parametrize("num_checkpoints", [1, 5])
def test_the_end_of_the_session_before_is_no_checkpoint(still_loop: StillLoop, num_checkpoints: int) -> None:
    """A slot can go on there, but not go back once it has gone on."""
    machine = recurrent(
        num_slots=1, most_sent_rows=1000, proposer="errs", depth=2, num_checkpoints=num_checkpoints
    )
    machine.ask(GenerationRequest(_COMMON[:8], 1))
    machine.let_all(0)
    machine.texts_are_right()
    machine.ask(GenerationRequest(_COMMON[:9], 5))
    (asking,) = machine.asking
    machine.let_all(0)
    assert asking.num_cached == 8
    machine.texts_are_right()
    # What it leaves is a place to go on from, or to go back to.
    machine.ask(GenerationRequest((*_COMMON[:8], 0), 1))
    machine.let_all(0)
    machine.texts_are_right()
    assert machine.coordinator.status().prefix_mismatches == 0
    machine.teardown()
