"""Sessions of models that go back to checkpoints only: no stage is asked for what it does not hold."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.coordinator.checkpoint_plan import CheckpointPlan
from mesh.coordinator.generation import Generation, WindowPlan
from mesh.engine import GenerationRequest
from speculative.proposer import Proposal


def rule(tokens: tuple[int, ...]) -> int:
    """A deterministic next token with repeats in it, so that some guesses are right."""
    return (tokens[-1] * 3 + len(tokens) // 4) % 7


class RecurrentStage:
    """What one stage holds: the state after some tokens, and copies of earlier ones."""

    def __init__(self, capacity: int, state: tuple[int, ...] = (), positions: tuple[int, ...] = ()) -> None:
        self.capacity = capacity
        self.state = state
        self.copies = {position: state[:position] for position in positions}

    def compute(self, window: WindowPlan) -> None:
        if window.start != len(self.state):
            self.state = self.copies[window.start] if window.start else ()
        self.copies = {at: copy for at, copy in self.copies.items() if at <= window.start}
        if checkpoints := window.asks.get("checkpoints"):
            self.copies = {at: copy for at, copy in self.copies.items() if at in checkpoints}
            if window.start in checkpoints:
                self.copies[window.start] = self.state
        assert len(self.copies) <= self.capacity
        self.state += window.tokens


class Pipeline:
    """Two stages; the second may lag behind and then misses windows that have become void."""

    def __init__(self, first: RecurrentStage, second: RecurrentStage) -> None:
        self.first, self.second = first, second
        self.waiting: deque[WindowPlan] = deque()

    def send(self, window: WindowPlan) -> None:
        self.first.compute(window)
        self.waiting.append(window)

    def verdict(self) -> tuple[int, ...]:
        window = self.waiting.popleft()
        self.second.compute(window)
        sampled = []
        for place in range(window.stop - window.num_verified, window.stop):
            sampled.append(rule(self.second.state[: place + 1]))
            if place + 1 < window.stop and self.second.state[place + 1] != sampled[-1]:
                break
        return tuple(sampled)

    def void(self, num_computed: int) -> None:
        """All that waits is void; some of it was computed all the same."""
        for window in [*self.waiting][:num_computed]:
            self.second.compute(window)
        self.waiting.clear()


def answer(
    request: GenerationRequest,
    *,
    capacity: int,
    max_rows: int,
    depth: int,
    draws: st.DataObject,
    cached: tuple[int, ...] = (),
) -> tuple[tuple[int, ...], Generation]:
    plan = CheckpointPlan(capacity, cached)
    num_cached = cached[-1] if cached else 0
    generation = Generation(
        request, context_length=512, max_rows=max_rows, num_cached=num_cached, rollback=plan
    )
    pipeline = Pipeline(
        *(RecurrentStage(capacity, request.prompt[:num_cached], cached) for _ in range(2)),
    )
    while True:
        while not generation.is_prefilled:
            pipeline.send(generation.prefill(draws.draw(st.integers(1, max_rows))))
        step = None
        while generation.num_in_flight < depth:
            room = generation.room
            width = max(0, min(room, draws.draw(st.integers(0, 5))))
            known = [*generation.tokens, *generation.ahead]
            for _ in range(width):
                known.append((rule(tuple(known)) + draws.draw(st.sampled_from((0, 0, 0, 1)))) % 7)
            guess = Proposal(tuple(known[len(known) - width :]), (0.5,) * width, "test")
            if generation.num_in_flight and not width:
                break
            window = generation.next_window(guess)
            assert len(window.tokens) <= max_rows
            assert (
                window.tokens[: window.num_recomputed]
                == generation.tokens[window.start : window.start + window.num_recomputed]
            )
            pipeline.send(window)
        while step is None:
            step = generation.commit(pipeline.verdict())
        if step.finish is not None:
            return generation.tokens, generation
        if step.voided:
            pipeline.void(draws.draw(st.integers(0, len(step.voided))))


@settings(deadline=None)
@given(
    draws=st.data(),
    capacity=st.integers(1, 8),
    max_rows=st.integers(12, 24),
    depth=st.integers(1, 9),
    num_prompt=st.integers(1, 120),
)
def test_a_stage_can_go_back_to_every_window_s_start(
    draws: st.DataObject, capacity: int, max_rows: int, depth: int, num_prompt: int
) -> None:
    prompt = tuple(number % 7 for number in range(num_prompt))
    request = GenerationRequest(prompt=prompt, max_tokens=60)
    tokens, generation = answer(request, capacity=capacity, max_rows=max_rows, depth=depth, draws=draws)
    expected = prompt
    while len(expected) < len(tokens):
        expected += (rule(expected),)
    assert tokens == expected
    assert all(point <= len(generation.computed) for point in generation.return_points)


@settings(deadline=None, max_examples=30)
@given(draws=st.data(), points=st.sets(st.integers(1, 90), min_size=1, max_size=4))
def test_a_session_goes_on_from_a_checkpoint_of_its_prefix(draws: st.DataObject, points: set[int]) -> None:
    prompt = tuple(number % 7 for number in range(100))
    request = GenerationRequest(prompt=prompt, max_tokens=20)
    tokens, _ = answer(request, capacity=4, max_rows=16, depth=3, draws=draws, cached=tuple(sorted(points)))
    assert tokens[:100] == prompt


def test_no_checkpoint_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="without one"):
        CheckpointPlan(0)


def test_the_end_of_the_prompt_stays_while_later_ones_come_and_go() -> None:
    plan = CheckpointPlan(3)
    plan.add(10, 10)
    plan.pin(10)
    for position in range(20, 400, 10):
        assert position in plan.add(position, position)
    assert plan.positions[0] == 10
    assert plan.positions[-1] == 390


def test_checkpoints_far_back_lie_far_apart() -> None:
    plan = CheckpointPlan(6)
    for position in range(10, 1000, 10):
        plan.add(position, position)
    gaps = [later - earlier for earlier, later in zip(plan.positions, plan.positions[1:], strict=False)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] >= 100


def test_none_is_dropped_that_a_rejection_may_go_back_to() -> None:
    plan = CheckpointPlan(2)
    plan.add(50, 50)
    assert plan.add(60, 55) == (50, 60)
    assert not plan.has_room(55)
    assert plan.add(70, 55) == ()
    assert plan.positions == (50, 60)
