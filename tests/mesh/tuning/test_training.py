"""Training: it learns what can be foreseen, stops, goes on as if unbroken; a loss that is no number."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mesh.tuning.acceptance import acceptance_of
from mesh.tuning.answers import index_answers, split_by_prompt
from mesh.tuning.drafter_file import head_rows
from mesh.tuning.jobs import Schedule
from mesh.tuning.run_folder import RunFolder
from mesh.tuning.source import Source
from spanmesh_proto.errors import ModelError
from tests.support.recordings import foreseeable, write_recording
from tests.support.tiny_eagle3 import TinyEagle3
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from mesh.tuning.jobs import TrainingProgress

torch = pytest.importorskip("torch", reason="torch is not installed: make environment")

from mesh.tuning.measuring import measure  # noqa: E402
from mesh.tuning.network import Compute, Network, make_lexicon  # noqa: E402
from mesh.tuning.training import Lesson, Trainer  # noqa: E402

SCHEDULE = Schedule(passes=6, num_steps=1, batch=4, rate=2e-2)


class Broken(Exception):
    """The process is gone."""


class Room:
    """A tiny drafter and a recording of foreseeable text."""

    def __init__(self, folder: Path) -> None:
        target = TinyModel("llama", is_float=True).write(folder / "target.gguf")
        drafter = TinyEagle3(num_own_tokens=300).write(target, folder / "drafter.gguf")
        self.source = Source(target, drafter)
        head = head_rows(self.source.header).rows()
        recording = write_recording(
            folder / "recording", target, [foreseeable(each, head) for each in range(60)]
        )
        self.index = index_answers([recording], self.source.recorded)
        self.split = split_by_prompt(self.index.answers, ())
        self.lexicon = make_lexicon(self.source.embedding, np.arange(320), 320)
        self.folder = RunFolder(folder / "out.gguf")
        self.clock_s = 0.0

    def trainer(
        self,
        schedule: Schedule = SCHEDULE,
        *,
        report: Callable[[TrainingProgress], None] = lambda _: None,
        step_s: float = 0.0,
    ) -> tuple[Trainer, Network]:
        """A trainer whose clock goes on by so much with each look at it."""
        torch.set_num_threads(1)
        network = Network(self.source.weights, self.lexicon, Compute("cpu", is_bf16=False))
        token_ids = self.source.weights.token_ids
        lesson = Lesson(self.split.learned, self.split.watched, self.index.shape, self.lexicon, token_ids)

        def clock_s() -> float:
            self.clock_s += step_s
            return self.clock_s

        clocks = (clock_s, lambda: 0.0)
        return Trainer(network, lesson, schedule, self.folder, clocks=clocks, report=report), network

    def first(self, network: Network) -> float:
        """Acceptance of the first token on held-out answers."""
        answers = measure(
            network, self.lexicon, self.split.held, self.index.shape, self.source.weights.token_ids
        )
        found = acceptance_of(answers)
        assert found is not None
        return found.unconditional[0].value


@pytest.fixture(name="room")
def _room(tmp_path: Path) -> Room:
    room = Room(tmp_path)
    room.folder.begin({})
    return room


def weights(network: Network) -> dict[str, NDArray[np.float32]]:
    return dict(network.weights().trained)


def test_what_can_be_foreseen_is_learned(room: Room) -> None:
    told: list[TrainingProgress] = []
    trainer, network = room.trainer(report=told.append)
    before = room.first(network)
    state = trainer.run()
    assert before < 0.1
    assert room.first(network) > 0.6
    assert state.stopped_by == "passes"
    assert state.step == trainer.num_steps == 6 * 12
    assert state.best_step > 0
    assert state.num_tokens == 6 * sum(len(answer.tokens) - 1 for answer in room.split.learned)
    assert told[-1].step == trainer.num_steps
    assert told[-1].watched > told[0].watched
    losses = [each.loss for each in told if each.loss == each.loss]
    assert losses[-1] < losses[0]


def test_a_broken_run_ends_as_an_unbroken_one(room: Room) -> None:
    schedule = replace(SCHEDULE, passes=2)
    trainer, network = room.trainer(schedule)
    whole = trainer.run()
    unbroken = weights(network)
    room.folder.remove()
    room.folder.begin({})

    def report(at: TrainingProgress) -> None:
        if at.step == 21:
            raise Broken

    # A checkpoint after each step; the last one before the break is of step 20.
    trainer, _ = room.trainer(replace(schedule, minutes=1e6), report=report, step_s=100.0)
    with pytest.raises(Broken):
        trainer.run()
    assert (room.folder.path / "latest.npz").exists()
    trainer, network = room.trainer(schedule)
    state = trainer.run()
    assert state == whole
    for name, array in weights(network).items():
        np.testing.assert_array_equal(array, unbroken[name])
    # A run that is over is over.
    again, network = room.trainer(schedule)
    assert again.run() == whole
    np.testing.assert_array_equal(weights(network)["fc.weight"], unbroken["fc.weight"])


def test_a_run_ends_in_time_and_goes_on_later(room: Room) -> None:
    trainer, _ = room.trainer(replace(SCHEDULE, minutes=0.5), step_s=4.0)
    state = trainer.run()
    assert state.stopped_by == "minutes"
    assert 0 < state.step < trainer.num_steps
    trainer, _ = room.trainer()
    assert trainer.run().stopped_by in {"passes", "gain"}


def test_a_run_without_gain_stops(room: Room) -> None:
    # Nothing is learned at this rate, and nothing is gained.
    trainer, network = room.trainer(replace(SCHEDULE, rate=1e-9))
    before = weights(network)
    state = trainer.run()
    assert state.stopped_by == "gain"
    assert state.step == round(trainer.num_steps * 3 / 10)
    assert state.best_step == 0
    for name, array in weights(network).items():
        np.testing.assert_array_equal(array, before[name])


def test_a_loss_that_is_no_number_costs_half_the_rate_once(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, network = room.trainer()
    loss, num_calls = network.loss, 0

    def spoilt(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return loss(*arguments) * (float("nan") if num_calls == 7 else 1.0)

    monkeypatch.setattr(network, "loss", spoilt)
    state = trainer.run()
    assert state.share_of_rate == 0.5
    assert state.stopped_by == "passes"
    assert room.first(network) > 0.2
    room.folder.remove()
    room.folder.begin({})
    trainer, network = room.trainer()
    monkeypatch.setattr(network, "loss", lambda *arguments: loss(*arguments) * float("nan"))
    with pytest.raises(ModelError, match="the loss is no number, at half the rate as well"):
        trainer.run()


def test_answers_that_vanish_meanwhile_are_left_out(room: Room) -> None:
    for answer in room.split.learned[::2]:
        answer.path.unlink()
    trainer, network = room.trainer()
    assert trainer.run().stopped_by == "passes"
    assert room.first(network) > 0.3
