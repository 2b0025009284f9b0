"""Plan of `mesh bench spec`: trials, presets and settings of the peer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from meshbench.speculation_acceptance import EXACT, WITH_DRAFT, WITH_HISTORY, WITHOUT_DRAFT
from meshbench.speculation_blocks import PAIRED, published_rates
from meshbench.speculation_features import WITH_FEATURES
from meshbench.speculation_results import (
    AUTO,
    DRAFT,
    IN_STEP,
    NGRAM,
    OFF_AGAIN,
    REPLAY,
    WITH_RATES,
    Setting,
)
from meshbench.speculation_workloads import CHAT, CODING, SPEC_BENCH, WARM_REPEAT, Workload, choose

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from mesh.engine import SpeculationMode
    from meshbench.speculation_workloads import Question

_NUM_CONCURRENT_ROUNDS: Final = 4
_CONCURRENT: Final = (4, 8)
# Prose and code stand for all where drawn answers are held against greedy ones.
_SAMPLED: Final = frozenset({"writing", "coding"})
# One drawn answer may be easy or hard to foretell by chance: each question is drawn with several seeds.
_NUM_DRAWS: Final = 3
_SESSIONS: Final = ("--parallel", "8")
_QUICK_DELAY_MS: Final = 5.0
_QUICK_NAMES: Final = ("built-in", "repository-edit", "tool-call", "random-token", "built-in-raw")
_QUICK_AT_ONCE: Final = 4
# Requests narrow it.
_DRAFT_MAX: Final = 16
# Drafters that read hidden states are right too rarely further behind the last one.
_FEATURES_DRAFT_MAX: Final = 8
_FEATURES_WIDTHS: Final = (1, 2, 4, 8)
_NUM_REPLAYED: Final = 4
_PAIRED_DELAYS_MS: Final = (0.1, 5.0, 20.0)
_NUM_PAIRED_ROUNDS: Final = 10
# Acceptance of a good drafter of single tokens, by distance from the last hidden state.
_GOOD_RATES: Final = (0.75, 0.72, 0.7, 0.68, 0.66, 0.64, 0.62, 0.6)
# Name of the only server of a run that starts none.
AS_SERVED: Final = "as served"

Preset: TypeAlias = Literal["sweep", "acceptance", "features", "quick"]


@dataclass(frozen=True)
class Trial:
    """Some questions at one delay.

    Each question is one turn: it is answered under `off` and under each setting, one right after the other.
    """

    delay_ms: float
    """One way."""
    workload: Workload
    """Name of the workload."""
    settings: tuple[Setting, ...]
    """Besides `off`."""
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})
    """Sampling fields of the request body."""
    with_peer: bool = False
    """Whether llama.cpp RPC takes part in each turn."""

    @property
    def temperature(self) -> float:
        """Of sampling."""
        return float(self.sampling["temperature"])


@dataclass(frozen=True)
class ConcurrentTrial:
    """Trials of some workloads, asked together."""

    delay_ms: float
    """One way."""
    workload: Workload
    """Its questions are taken in turn until there are enough."""
    setting: Setting
    """Against `off`."""
    num_at_once: int
    """How many questions, all at once."""
    num_rounds: int
    """How often `off` and the setting take turns."""


@dataclass(frozen=True)
class OtherServer:
    """A mesh that answers the same questions, in turn with that of its phase."""

    name: str
    """For tables."""
    options: tuple[str, ...]
    """Of `mesh serve`."""


@dataclass(frozen=True)
class Phase:
    """A mesh, started once, with its phases."""

    server: str
    """Name of this way to start it."""
    options: tuple[str, ...]
    """Of `mesh serve`."""
    trials: tuple[Trial, ...]
    """In order."""
    concurrent_trials: tuple[ConcurrentTrial, ...] = ()
    """After the trials."""
    beside: OtherServer | None = None
    """Measured in turn with it, if anything is."""

    @property
    def replays(self) -> bool:
        """Whether the server needs the file of recorded answers."""
        return any(setting.mode == REPLAY.mode for trial in self.trials for setting in trial.settings)


@dataclass(frozen=True)
class ServeOptions:
    """Options of every mesh of a plan."""

    draft_model: Path | None
    """A GGUF for the draft proposer, or None to go without."""
    exact: bool = False
    """Numeric mode."""
    other_draft: Path | None = None
    """A drafter that the draft proposer is compared with, or None."""
    draft_max: int = _DRAFT_MAX
    """Of `mesh serve`."""

    def of(
        self, mode: SpeculationMode, *more: str, draft: bool = True, exact: bool = False
    ) -> tuple[str, ...]:
        """Options of `mesh serve`."""
        model = (
            ("--draft", str(self.draft_model), "--draft-max", str(self.draft_max))
            if draft and self.draft_model
            else ()
        )
        numerics = ("--exact",) if exact or self.exact else ()
        return ("--speculate", mode, *model, *numerics, *more)


@dataclass(frozen=True)
class PeerSetting:
    """Options of its server."""

    name: str
    """For tables."""
    options: tuple[str, ...]
    """Of `llama-server`, besides those that spread the model over hosts."""


def narrowed(
    phases: tuple[Phase, ...], *, delays_ms: Collection[float], workloads: Collection[str]
) -> tuple[Phase, ...]:
    """The part of a plan at these delays, on these workloads; all of them where none is named.

    Requests at once keep their workload, which is a mixture.
    """

    def is_wanted(delay_ms: float, workload: str | None) -> bool:
        return (not delays_ms or delay_ms in delays_ms) and (
            not workloads or workload is None or workload in workloads
        )

    kept = (
        replace(
            phase,
            trials=tuple(trial for trial in phase.trials if is_wanted(trial.delay_ms, trial.workload.name)),
            concurrent_trials=tuple(
                concurrent_trial
                for concurrent_trial in phase.concurrent_trials
                if is_wanted(concurrent_trial.delay_ms, None)
            ),
        )
        for phase in phases
    )
    return tuple(phase for phase in kept if phase.trials or phase.concurrent_trials)


def without_replay(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """A plan without `replay`, for which a mesh needs the answers of a run of its own."""

    def kept(trial: Trial) -> Trial:
        return replace(trial, settings=tuple(each for each in trial.settings if each.mode != REPLAY.mode))

    return tuple(replace(phase, trials=tuple(map(kept, phase.trials))) for phase in phases)


def in_turn(settings: tuple[Setting, ...], turn: int) -> tuple[Setting, ...]:
    """The settings in their order on even turns and backwards on odd ones, `replay` at the end of either.

    So no setting always runs on what the one before it left behind, such as a warm processor; only `replay`
    needs what `off` answered.
    """
    others = tuple(setting for setting in settings if setting.mode != REPLAY.mode)
    replays = tuple(setting for setting in settings if setting.mode == REPLAY.mode)
    return (others if turn % 2 == 0 else others[::-1]) + replays


def acceptance_plan(workloads: Mapping[str, Workload], serve: ServeOptions, seed: int) -> tuple[Phase, ...]:
    """All lines of the acceptance table.

    Where answers are slow, at 20 ms, or a prompt is answered in many ways, one question stands for its
    workload; `auto` at the shorter delays is asked all. Three a workload, 128 tokens each: forty minutes.
    """
    categories = [workload for workload in workloads.values() if workload.source == SPEC_BENCH]
    talk = {workload.name for workload in categories} & {*CHAT, *CODING}
    edit, call, random = choose(dict(workloads), ("repository-edit", "tool-call", "random-token"))
    everywhere = [*categories, edit, call, random]
    samplings: list[dict[str, Any]] = [{"temperature": 0}]
    samplings += [{"temperature": 0.8, "seed": seed + draw} for draw in range(_NUM_DRAWS)]

    def settings(workload: Workload) -> tuple[Setting, ...]:
        return (AUTO, DRAFT, REPLAY) if workload.name in talk else (AUTO, REPLAY)

    return (
        Phase(
            WITH_DRAFT,
            serve.of("auto", *_SESSIONS),
            (
                *(Trial(0.1, workload, (AUTO, OFF_AGAIN)) for workload in [*categories, random]),
                *(Trial(5.0, workload.first(1), settings(workload)) for workload in everywhere),
                *(
                    Trial(5.0, others, (AUTO, REPLAY))
                    for workload in everywhere
                    if (others := workload.without(workload.first(1))).questions
                ),
                *(
                    Trial(
                        20.0, workload.first(1), settings(workload), with_peer=workload.source == SPEC_BENCH
                    )
                    for workload in [*categories, random]
                ),
            ),
            tuple(
                ConcurrentTrial(5.0, _mixed(categories or [edit, call]), AUTO, count, _NUM_CONCURRENT_ROUNDS)
                for count in _CONCURRENT
            ),
        ),
        Phase(
            WITHOUT_DRAFT,
            serve.of("auto", draft=False),
            tuple(Trial(5.0, workload, (AUTO,)) for workload in categories),
        ),
        Phase(
            WITH_HISTORY,
            serve.of("auto", "--spec-history", draft=False),
            (Trial(5.0, workloads[WARM_REPEAT], (AUTO,)),),
        ),
        Phase(
            EXACT,
            serve.of("auto", exact=True),
            tuple(
                Trial(20.0, workload.first(1), (DRAFT,), sampling)
                for workload in categories
                if workload.name in _SAMPLED
                for sampling in samplings
            ),
        ),
    )


def drafter_plan(
    workloads: Mapping[str, Workload],
    serve: ServeOptions,
    rates: Sequence[float],
    *,
    target: Path,
    delays_ms: Collection[float],
    names: Sequence[str],
) -> tuple[Phase, ...]:
    """What a drafter that reads hidden states is worth: of blocks `paired_plan`, of others `features_plan`.

    Of two drafters `compared_plan`.

    Args:
        workloads: All of them, with two questions of each category.
        serve: With the drafter as its draft model.
        rates: See `replay-rates` of `mesh serve --set`; empty takes published ones of the drafter's kind.
        target: The model.
        delays_ms: See `narrowed`.
        names: Workloads to ask; empty takes all.

    Raises:
        InvalidModel: If there is no drafter, or it is for another model.
    """
    published = None if serve.draft_model is None else published_rates(serve.draft_model, target)
    if published is None and serve.other_draft is None:
        plan = features_plan(workloads, serve, rates or _GOOD_RATES)
        return narrowed(plan, delays_ms=delays_ms, workloads=names)
    usual = [name for name in (*CHAT, *CODING) if name in workloads]
    categories = [workload.name for workload in workloads.values() if workload.source == SPEC_BENCH]
    chosen = choose(dict(workloads), names or usual or categories)
    if serve.other_draft is not None:
        # Another model's is refused before anything is started.
        published_rates(serve.other_draft, target)
        plan = compared_plan(chosen, serve, serve.other_draft)
    else:
        plan = paired_plan(chosen, serve, rates or published or ())
    return narrowed(plan, delays_ms=delays_ms, workloads=())


def paired_plan(
    workloads: Sequence[Workload], serve: ServeOptions, rates: Sequence[float]
) -> tuple[Phase, ...]:
    """What a drafter of blocks is worth, by paired rounds: about eight minutes with 40 tokens an answer.

    At each delay ten questions, each under `off`, `off` again and the drafter's settings: first with what it
    drafts, then with its drafts replaced by such of the given acceptance. Its blocks are as long as there are
    rates then.

    Args:
        workloads: Their questions are taken in turn.
        serve: With the drafter as its draft model.
        rates: See `replay-rates` of `mesh serve --set`.
    """
    paired = _paired(workloads)
    drafter = replace(serve, draft_max=_FEATURES_DRAFT_MAX)
    replayed = replace(serve, draft_max=len(rates))
    given = f"replay-rates={','.join(f'{rate:g}' for rate in rates)}"

    def trials(*settings: Setting) -> tuple[Trial, ...]:
        return tuple(Trial(delay_ms, paired, settings) for delay_ms in _PAIRED_DELAYS_MS)

    return (
        Phase(WITH_FEATURES, drafter.of("auto"), trials(OFF_AGAIN, AUTO, DRAFT)),
        Phase(
            WITH_RATES,
            replayed.of("auto", "--set", given),
            trials(OFF_AGAIN, REPLAY),
        ),
    )


def compared_plan(workloads: Sequence[Workload], serve: ServeOptions, other: Path) -> tuple[Phase, ...]:
    """What a drafter is worth beside another one: about six minutes with 40 tokens an answer.

    At each delay ten questions, each under `off` and the drafters' settings, by two meshes in turn.

    Args:
        workloads: Their questions are taken in turn.
        serve: With the drafter as its draft model.
        other: What it is compared with.
    """
    drafter = replace(serve, draft_max=_FEATURES_DRAFT_MAX)
    beside = OtherServer(other.name, replace(drafter, draft_model=other).of("auto"))
    trials = (Trial(delay_ms, _paired(workloads), (AUTO, DRAFT)) for delay_ms in _PAIRED_DELAYS_MS)
    return (Phase(WITH_FEATURES, drafter.of("auto"), tuple(trials), beside=beside),)


def features_plan(
    workloads: Mapping[str, Workload], serve: ServeOptions, rates: Sequence[float]
) -> tuple[Phase, ...]:
    """What a drafter that reads hidden states is worth, and what a better one would be worth.

    At 0.1 ms two questions of each category, under `auto` and `off` again; at 5 and 20 ms one of each, with
    every draft length, and the same prompts without a chat template beside them.

    Args:
        workloads: All of them, with two questions of each category.
        serve: With the drafter as its draft model.
        rates: See `replay-rates` of `mesh serve --set`.
    """
    categories = [workload for workload in workloads.values() if workload.source == SPEC_BENCH]
    chat = [workload for workload in categories if workload.name in CHAT] or categories
    serve = replace(serve, draft_max=_FEATURES_DRAFT_MAX)
    lengths = tuple(Setting("draft", width) for width in _FEATURES_WIDTHS)
    steps = tuple(Setting("replay", width, 1, f"{IN_STEP}/{width}") for width in _FEATURES_WIDTHS)
    slow = (5.0, 20.0)
    return (
        Phase(
            WITH_FEATURES,
            serve.of("auto"),
            (
                *(Trial(0.1, workload, (AUTO, OFF_AGAIN)) for workload in categories),
                *(
                    Trial(delay_ms, workload.first(1), settings)
                    for delay_ms in slow
                    for chatted in categories
                    for workload, settings in (
                        (chatted, (DRAFT, *lengths, NGRAM, AUTO)),
                        (chatted.without_template(), (DRAFT, AUTO)),
                    )
                ),
            ),
        ),
        Phase(
            WITH_RATES,
            serve.of("auto", "--set", f"replay-rates={','.join(f'{rate:g}' for rate in rates)}", draft=False),
            tuple(
                Trial(delay_ms, workload.first(1), (*steps, REPLAY))
                for delay_ms in (0.1, *slow)
                for workload in chat[:_NUM_REPLAYED]
            ),
        ),
    )


def quick_plan(workloads: Mapping[str, Workload], serve: ServeOptions) -> tuple[Phase, ...]:
    """One mesh, one delay, one question of each of the project's own workloads: about a minute."""
    modes = (NGRAM, AUTO, *((DRAFT,) if serve.draft_model else ()), REPLAY)
    return (
        Phase(
            "quick",
            serve.of("auto", *_SESSIONS),
            tuple(
                Trial(_QUICK_DELAY_MS, workload.first(1), modes)
                for workload in choose(dict(workloads), _QUICK_NAMES)
            ),
            (ConcurrentTrial(_QUICK_DELAY_MS, workloads["built-in"], AUTO, _QUICK_AT_ONCE, 1),),
        ),
    )


def sweep_plan(
    workloads: Sequence[Workload],
    serve: ServeOptions,
    *,
    modes: Sequence[SpeculationMode],
    widths: Sequence[int],
    delays_ms: Sequence[float],
    with_peer: bool,
) -> tuple[Phase, ...]:
    """Every proposer with every width on every workload at every delay.

    Warm workloads go to a mesh of their own, which keeps a history.
    """
    settings = _swept(modes, widths)
    cold = [workload for workload in workloads if not workload.is_warm]
    warm = [workload for workload in workloads if workload.is_warm]

    def trials(members: Sequence[Workload]) -> tuple[Trial, ...]:
        return tuple(
            Trial(delay_ms, workload, settings, with_peer=with_peer and not workload.is_raw)
            for delay_ms in delays_ms
            for workload in members
        )

    phases = (
        Phase("sweep", serve.of("auto"), trials(cold)),
        Phase("sweep with history", serve.of("auto", "--spec-history"), trials(warm)),
    )
    return tuple(phase for phase in phases if phase.trials)


def _swept(modes: Collection[SpeculationMode], widths: Sequence[int]) -> tuple[Setting, ...]:
    """Every proposer with every width, then those without a bound on it."""
    settings = tuple(
        Setting(mode, width) for mode in modes if mode not in {"off", "replay"} for width in widths
    )
    return settings + (AUTO,) * ("auto" in modes) + (REPLAY,) * ("replay" in modes)


def remote_plan(
    workloads: Mapping[str, Workload],
    chosen: Sequence[str],
    *,
    modes: Collection[SpeculationMode],
    widths: Sequence[int],
    delay_ms: float,
    num_places: int,
    is_quick: bool,
) -> Phase:
    """Trials on a mesh that runs already.

    Args:
        workloads: All of them.
        chosen: Names of those to ask; empty takes all whose figures need no history at the server.
        modes: Proposers.
        widths: Draft lengths of each proposer.
        delay_ms: One-way delay of the mesh's links, which its samples are filed under.
        num_places: Answers that the client may have at once.
        is_quick: Whether each proposer is asked without a bound on its drafts only, one question of each
            workload.
    """
    usual = [name for name in _QUICK_NAMES if name in workloads] if is_quick else []
    usual = usual or [name for name, workload in workloads.items() if not workload.is_warm]
    wanted = choose(dict(workloads), chosen or usual)
    settings = tuple(map(Setting, modes)) if is_quick else _swept(modes, widths)
    at_once = min(_QUICK_AT_ONCE, num_places)
    return Phase(
        AS_SERVED,
        (),
        tuple(Trial(delay_ms, workload.first(1) if is_quick else workload, settings) for workload in wanted),
        (ConcurrentTrial(delay_ms, workloads["built-in"], AUTO, at_once, 1),)
        * (is_quick and at_once > 1 and "auto" in modes),
    )


def _in_turn(workloads: Sequence[Workload]) -> tuple[Question, ...]:
    """The first question of each, then the second of each, and so on."""
    found = zip_longest(*(workload.questions for workload in workloads))
    return tuple(question for each in found for question in each if question is not None)


def _paired(workloads: Sequence[Workload]) -> Workload:
    """As many questions as there are paired rounds."""
    return replace(workloads[0], name=PAIRED, questions=_in_turn(workloads)[:_NUM_PAIRED_ROUNDS])


def _mixed(workloads: Sequence[Workload]) -> Workload:
    """The first question of each."""
    return replace(workloads[0], name="mixed", questions=tuple(found.questions[0] for found in workloads))


def peer_settings(draft_model: Path | None) -> tuple[PeerSetting, ...]:
    """Settings to compare: none, n-gram modes, and a draft model of several lengths if there is one.

    Its n-gram modes look for 12 equal tokens by default, which chat hardly ever has; they are given a length
    that finds something. The draft model stays on the head, where it costs no network; by default it would be
    spread over the hosts like the model itself.
    """
    found = [
        PeerSetting("off", ()),
        PeerSetting(
            "ngram-simple",
            _spec("ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"),
        ),
        PeerSetting("ngram-cache", _spec("ngram-cache")),
    ]
    if draft_model is not None:
        model = ("--spec-draft-model", str(draft_model))
        draft = (*model, "--spec-draft-device", "none", "--spec-draft-threads", "1")
        found += [
            PeerSetting(
                f"draft/{length} p_min {p_min}",
                _spec(
                    "draft-simple",
                    *draft,
                    *("--spec-draft-n-max", str(length), "--spec-draft-p-min", str(p_min)),
                ),
            )
            for length, p_min in ((2, 0.0), (4, 0.0), (8, 0.5))
        ]
    return tuple(found)


def _spec(kind: str, *options: str) -> tuple[str, ...]:
    return ("--spec-type", kind, *options)
