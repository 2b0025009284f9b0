"""Training of a drafter on recorded answers: steps, early stop, checkpoints.

The drawn tokens teach, by cross entropy; the optimiser is AdamW (Loshchilov and Hutter 2019) at a rate that
rises over ten steps and then falls as a cosine. What comes next depends on the number of the step alone, so a
run that goes on from a checkpoint ends as one without a break.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from mesh.tuning.acceptance import acceptance_of
from mesh.tuning.jobs import TrainingProgress, TrainingState
from mesh.tuning.measuring import measure, readable
from mesh.tuning.network import MOST_CHAINS, make_batch, num_chains
from mesh.tuning.run_folder import Checkpoint
from spanmesh_proto.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from mesh.tuning.answers import RecordedAnswer
    from mesh.tuning.conversation_file import FeatureShape
    from mesh.tuning.jobs import Schedule
    from mesh.tuning.network import Lexicon, Network
    from mesh.tuning.run_folder import RunFolder

_BETAS: Final = (0.9, 0.95)
_MOST_NORM: Final = 1.0
_WARM_UP_STEPS: Final = 10
_LEAST_SHARE_OF_RATE: Final = 0.05
# Batches of similar length are made of so many.
_NUM_SORTED: Final = 8
_NUM_WATCHES: Final = 10
_MOST_WITHOUT_GAIN: Final = 3
_LEAST_BETWEEN_SAVES_S: Final = 60.0
# Of the time; a large drafter's checkpoint takes seconds.
_MOST_SHARE_OF_SAVES: Final = 0.05
_LATEST: Final = "latest"
_BEST: Final = "best"
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class Lesson:
    """What is learned from."""

    learned: Sequence[RecordedAnswer]
    watched: Sequence[RecordedAnswer]
    shape: FeatureShape
    lexicon: Lexicon
    token_ids: NDArray[np.int64]
    """The model's ids of the drafter's tokens."""


class Trainer:
    """Training of one drafter.

    Args:
        network: The drafter; its weights at the end are the best ones.
        lesson: What it learns from.
        schedule: How long and how.
        folder: Where checkpoints are kept.
        clocks: Monotonic time and this process's processor time, in seconds.
        report: Called after steps and watches.
    """

    def __init__(
        self,
        network: Network,
        lesson: Lesson,
        schedule: Schedule,
        folder: RunFolder,
        *,
        clocks: tuple[Callable[[], float], Callable[[], float]],
        report: Callable[[TrainingProgress], None],
    ) -> None:
        self._network = network
        self._lesson = lesson
        self._schedule = schedule
        self._folder = folder
        self._clock_s, self._spent_s = clocks
        self._report = report
        self._batches_per_pass = math.ceil(len(lesson.learned) / schedule.batch)
        self.num_steps = self._batches_per_pass * schedule.passes
        self._watches = {round(self.num_steps * index / _NUM_WATCHES) for index in range(1, _NUM_WATCHES + 1)}
        self._parameters = list(network.parameters.values())
        self._optimiser = self._new_optimiser()
        self._order: tuple[int, list[list[int]]] = (-1, [])
        self.state = TrainingState()

    def run(self) -> TrainingState:
        """Learn until the passes are done, nothing is gained any more, or the time is over.

        Raises:
            ModelError: If the loss is no number, twice; or if a checkpoint cannot be read or written.
        """
        begun_s = saved_s = self._clock_s()
        save_s = 0.0
        if not self._restore():
            self._watch()
        while not self.state.stopped_by:
            if self.state.step >= self.num_steps:
                self._stop("passes")
            elif self._clock_s() - begun_s > 60.0 * self._schedule.minutes:
                num_without_gain = self.state.num_without_gain
                self._watch()
                # A run that goes on later has not watched here.
                num_without_gain = min(num_without_gain, self.state.num_without_gain)
                self.state = replace(self.state, num_without_gain=num_without_gain)
                self._stop("minutes")
            else:
                self._learn()
                if self.state.step in self._watches:
                    self._watch()
                if self.state.num_without_gain >= _MOST_WITHOUT_GAIN:
                    self._stop("gain")
            now_s = self._clock_s()
            if now_s - saved_s >= max(_LEAST_BETWEEN_SAVES_S, save_s / _MOST_SHARE_OF_SAVES):
                self._save()
                saved_s = self._clock_s()
                save_s = saved_s - now_s
        self._save()
        self._network.set_parameters(self._load(_BEST).arrays)
        return self.state

    def _learn(self) -> None:
        begun_s, state = self._spent_s(), self.state
        conversations = [
            each
            for each in readable([self._lesson.learned[index] for index in self._batch()], self._lesson.shape)
            if num_chains(each, 1)
        ]
        self.state = replace(state, step=state.step + 1)
        if not conversations:
            return
        network, device = self._network, self._network.compute.device
        batch = make_batch(conversations, self._lesson.lexicon, 1, device)
        rng = np.random.default_rng([self._schedule.seed, state.step])
        batch = batch.part(int(rng.integers(max(1, batch.starts.shape[1] - MOST_CHAINS + 1))))
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate(state.step) * state.share_of_rate
        self._optimiser.zero_grad(set_to_none=True)
        with network.compute.autocast():
            loss = network.loss(batch, self._schedule.num_steps)
        if not loss.requires_grad:
            return  # no token of these answers can be drafted
        if not bool(torch.isfinite(loss)):
            self._go_back()
            return
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, _MOST_NORM)
        self._optimiser.step()
        self.state = replace(
            self.state,
            num_tokens=state.num_tokens + int(batch.is_chain.sum()),
            spent_s=state.spent_s + self._spent_s() - begun_s,
        )
        self._tell(float(loss.detach()))

    def _batch(self) -> list[int]:
        """Indices of the answers of the next step."""
        number, place = divmod(self.state.step, self._batches_per_pass)
        if self._order[0] != number:
            self._order = (number, self._ordered(number))
        return self._order[1][place]

    def _ordered(self, number: int) -> list[list[int]]:
        """Batches of a pass, in an order of its own: of similar length each, so that little is padded."""
        rng = np.random.default_rng([self._schedule.seed, number, 1])
        drawn, size = rng.permutation(len(self._lesson.learned)).tolist(), self._schedule.batch
        together = size * _NUM_SORTED
        batches: list[list[int]] = []
        for first in range(0, len(drawn), together):
            some = sorted(
                drawn[first : first + together],
                key=lambda index: len(self._lesson.learned[index].token_ids),
            )
            batches += [some[at : at + size] for at in range(0, len(some), size)]
        return [batches[index] for index in rng.permutation(len(batches))]

    def _rate(self, step: int) -> float:
        risen = min(1.0, (step + 1) / _WARM_UP_STEPS)
        fallen = 0.5 * (1.0 + math.cos(math.pi * step / self.num_steps))
        return self._schedule.rate * risen * max(_LEAST_SHARE_OF_RATE, fallen)

    def _watch(self) -> None:
        """Measure on watched answers, and keep the weights if they are the best ones."""
        lesson = self._lesson
        answers = measure(self._network, lesson.lexicon, lesson.watched, lesson.shape, lesson.token_ids)
        found = acceptance_of(answers)
        score = 0.0 if found is None else found.per_window.value
        state = replace(self.state, watched=score)
        if score > state.best:
            self.state = replace(state, best=score, best_step=state.step, num_without_gain=0)
            self._folder.save(_BEST, Checkpoint(self._weights(), asdict(self.state)))
        else:
            self.state = replace(state, num_without_gain=state.num_without_gain + 1)
        self._tell(math.nan)

    def _go_back(self) -> None:
        """Go on from the best weights at half the rate, once."""
        if self.state.share_of_rate < 1.0:
            raise ModelError("the loss is no number, at half the rate as well: choose a lower --rate")
        self._network.set_parameters(self._load(_BEST).arrays)
        self._optimiser = self._new_optimiser()
        self.state = replace(self.state, share_of_rate=0.5)

    def _stop(self, reason: str) -> None:
        self.state = replace(self.state, stopped_by=reason)

    def _tell(self, loss: float) -> None:
        state = self.state
        rate = state.num_tokens / state.spent_s if state.spent_s else 0.0
        self._report(TrainingProgress(state.step, self.num_steps, loss, rate, state.watched))

    def _new_optimiser(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self._parameters, lr=self._schedule.rate, betas=_BETAS, weight_decay=0.0)

    def _weights(self) -> dict[str, NDArray[np.float32]]:
        return {name: _as_array(tensor) for name, tensor in self._network.parameters.items()}

    def _save(self) -> None:
        arrays = self._weights()
        counts = {}
        for name, tensor in self._network.parameters.items():
            moments = self._optimiser.state.get(tensor, {})
            for moment in _MOMENTS:
                # There are none before the first step.
                arrays[f"{moment} {name}"] = _as_array(moments.get(moment, torch.zeros_like(tensor)))
            counts[name] = float(moments.get("step", 0.0))
        self._folder.save(_LATEST, Checkpoint(arrays, {**asdict(self.state), "counts": counts}))

    def _restore(self) -> bool:
        """Go on from the latest checkpoint; returns whether there is one."""
        found = self._folder.load(_LATEST, self._shapes(_MOMENTS))
        if found is None:
            return False
        said = dict(found.state)
        try:
            counts: Mapping[str, float] = {
                name: float(said["counts"][name]) for name in self._network.parameters
            }
            del said["counts"]
            # A longer time may be given.
            stopped_by = "" if said["stopped_by"] == "minutes" else said["stopped_by"]
            self.state = replace(TrainingState(**said), stopped_by=stopped_by)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"{self._folder.path} holds a checkpoint of another version: remove it and leave out --resume"
            ) from error
        self._network.set_parameters(found.arrays)
        for name, tensor in self._network.parameters.items():
            if counts[name]:
                moments: dict[str, Any] = {
                    moment: torch.from_numpy(found.arrays[f"{moment} {name}"]).to(tensor.device)
                    for moment in _MOMENTS
                }
                self._optimiser.state[tensor] = {"step": torch.tensor(counts[name]), **moments}
        return True

    def _load(self, name: str) -> Checkpoint:
        found = self._folder.load(name, self._shapes(()))
        if found is None:
            raise ModelError(f"{self._folder.path} has lost its {name} weights: remove it, and begin anew")
        return found

    def _shapes(self, moments: Sequence[str]) -> dict[str, tuple[int, ...]]:
        shapes = {name: tuple(tensor.shape) for name, tensor in self._network.parameters.items()}
        return shapes | {f"{moment} {name}": shape for moment in moments for name, shape in shapes.items()}


def _as_array(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().cpu().numpy().copy()
    return array
