"""Work of the process that computes with torch: a tuning from a recording to a file, and measuring."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from mesh.tuning.acceptance import acceptance_of
from mesh.tuning.answers import index_answers, split_by_prompt
from mesh.tuning.drafter_file import write_weights
from mesh.tuning.jobs import Measured, MeasuredFolder, TuneOutcome
from mesh.tuning.measuring import measure, with_strange_features
from mesh.tuning.network import Compute, Network, make_lexicon
from mesh.tuning.recording import read_recording_header, require_same
from mesh.tuning.run_folder import RunFolder
from mesh.tuning.source import PROMPTS, Source
from mesh.tuning.training import Lesson, Trainer
from spanmesh_proto.errors import ModelError
from stages.gguf import Value, ValueType
from stages.host.processor_fit import processor_flags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from mesh.tuning.answers import RecordedAnswer
    from mesh.tuning.conversation_file import FeatureShape
    from mesh.tuning.drafter_file import Eagle3Weights
    from mesh.tuning.jobs import Device, MeasureJob, Progress, TrainingProgress, TuneJob
    from mesh.tuning.network import Lexicon

# Instructions for products in bfloat16; elsewhere they are slower than those in float32.
_BF16: Final = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
# Answer tokens that tell whether features and tokens belong together.
_CHECKED_TOKENS: Final = 2000
# Right tokens at the first position, over those with features of other positions. A trained drafter foretells
# more than the least rate from tokens alone; one that does not is at the beginning, and nothing can be told.
_LEAST_FACTOR: Final = 1.5
_LEAST_RATE: Final = 0.02
_CANDIDATE: Final = "candidate.gguf"


class _Measuring:
    """What drafts of several drafters on the same answers have in common."""

    def __init__(self, lexicon: Lexicon, compute: Compute, shape: FeatureShape, report: Progress) -> None:
        self._lexicon = lexicon
        self._compute = compute
        self._shape = shape
        self._report = report

    def network(self, weights: Eagle3Weights) -> Network:
        return Network(weights, self._lexicon, self._compute)

    def drafts(self, weights: Eagle3Weights, name: str, answers: Sequence[RecordedAnswer]) -> Measured:
        """Drafts of a drafter on answers."""
        found = measure(
            self.network(weights),
            self._lexicon,
            answers,
            self._shape,
            weights.token_ids,
            progress=lambda share: self._report(f"measuring {name}", share),
        )
        return Measured(name, tuple(found))

    def check_features(self, weights: Eagle3Weights, name: str, answers: Sequence[RecordedAnswer]) -> None:
        """Check that a drafter foretells more with the features than with those of other positions.

        Raises:
            ModelError: If it does not.
        """
        network, some = self.network(weights), _first(answers, _CHECKED_TOKENS)
        rates = []
        for change in (None, with_strange_features):
            found = measure(network, self._lexicon, some, self._shape, weights.token_ids, change=change)
            num_right = np.concatenate([each.num_right for each in found] or [np.zeros(1, np.int64)])
            rates.append(float((num_right > 0).mean()))
        if rates[0] < _LEAST_FACTOR * rates[1] and rates[1] >= _LEAST_RATE:
            raise ModelError(
                f"{name} foretells {rates[0]:.1%} of the recorded tokens, and {rates[1]:.1%} with features "
                "of other positions: features and tokens do not belong together, or it is a drafter of "
                "another model; record anew, or name another drafter with --from"
            )


def tune_here(job: TuneJob, report: Progress) -> TuneOutcome:
    """See `mesh.tuning.tuner.tune`."""
    with RunFolder(job.output) as folder:
        return _tuned_in(folder, job, report)


def _tuned_in(folder: RunFolder, job: TuneJob, report: Progress) -> TuneOutcome:
    source = Source(job.target, job.drafter)
    report("reading the recording", 0.0)
    index = index_answers(job.folders, source.recorded, job.choice)
    split = split_by_prompt(index.answers, source.known_prompts)
    compute = _compute(job.device)
    settings = _settings(job, index.answers, compute)
    start = source.with_vocabulary(split.learned, job.vocabulary)
    tokens = [answer.token_ids for answer in index.answers]
    lexicon = _lexicon(source, [*tokens, source.weights.token_ids, start.token_ids])
    measuring, name = _Measuring(lexicon, compute, index.shape, report), job.drafter.name
    if job.is_resumed:
        folder.resume(settings)
    else:
        measuring.check_features(source.weights, name, split.learned)
        folder.begin(settings)
    before = measuring.drafts(source.weights, name, split.held)
    network = measuring.network(start)
    trainer = Trainer(
        network,
        Lesson(split.learned, split.watched, index.shape, lexicon, start.token_ids),
        job.schedule,
        folder,
        clocks=(time.process_time if job.is_background else time.monotonic, time.process_time),
        report=lambda at: report(_shown(at), at.step / at.num_steps),
    )
    state = trainer.run()
    weights = network.weights()
    after = measuring.drafts(weights, job.output.name, split.held)
    outcome = TuneOutcome(
        candidate=folder.path / _CANDIDATE,
        before=before,
        after=after,
        num_learned=sum(len(answer.tokens) for answer in split.learned),
        num_prompts=len({answer.prompt for answer in split.learned}),
        num_dropped=index.num_dropped,
        num_steps=trainer.num_steps,
        state=state,
        num_own_tokens=len(start.token_ids),
        is_retrimmed=start is not source.weights,
    )
    learned = frozenset[int]().union(*(each.prompts for each in (*split.learned, *split.watched)))
    tuned = _tuned(job, outcome, learned | source.known_prompts)
    write_weights(outcome.candidate, source.drafter, weights, tuned)
    return outcome


def measure_here(job: MeasureJob, report: Progress) -> tuple[MeasuredFolder, ...]:
    """See `mesh.tuning.tuner.measure_drafters`."""
    sources = [Source(job.target, path) for path in job.drafters]
    known = frozenset[int]().union(*(source.known_prompts for source in sources))
    compute = _compute(job.device)
    found = []
    for path in job.folders:
        report(f"reading {path.name}", 0.0)
        for source in sources:
            require_same(read_recording_header(path), source.recorded, path)
        index = index_answers([path], sources[0].recorded)
        answers = [each for each in index.answers if each.prompts.isdisjoint(known)]
        measured = []
        for source in sources:
            lexicon = _lexicon(source, [source.weights.token_ids, *(each.token_ids for each in answers)])
            measuring = _Measuring(lexicon, compute, index.shape, report)
            measured.append(measuring.drafts(source.weights, source.drafter.path.name, answers))
        num_learned = len(index.answers) - len(answers)
        found.append(MeasuredFolder(path, tuple(measured), index.num_dropped, num_learned))
    return tuple(found)


def _lexicon(source: Source, tokens: Sequence[NDArray[Any]]) -> Lexicon:
    return make_lexicon(source.embedding, np.concatenate(tokens), source.facts.n_vocab)


def _compute(device: Device) -> Compute:
    """Where torch computes, in this process.

    Raises:
        ModelError: If there is no such device.
    """
    torch.set_num_threads(device.num_threads)
    try:
        torch.zeros(1, device=device.name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"torch cannot compute on {device.name}: {reason}; leave out --device") from error
    if device.name.startswith("cuda"):
        return Compute(device.name, is_bf16=torch.cuda.is_bf16_supported())
    return Compute(device.name, is_bf16=device.name == "cpu" and not _BF16.isdisjoint(processor_flags()))


def _settings(job: TuneJob, answers: Sequence[RecordedAnswer], compute: Compute) -> dict[str, Any]:
    """What an unfinished run has to have in common with one that goes on with it."""
    recorded = hashlib.sha256()
    for answer in answers:
        recorded.update(f"{answer.path.name} {answer.prompt_id}\n".encode())
        recorded.update(answer.token_ids.tobytes())
    with job.drafter.open("rb") as file:
        drafter = hashlib.file_digest(file, "sha256").hexdigest()
    schedule = asdict(job.schedule)
    del schedule["minutes"]
    return {
        "recording": recorded.hexdigest(),
        "drafter": drafter,
        "vocabulary": job.vocabulary,
        "threads": job.device.num_threads,
        **asdict(compute),
        **schedule,
    }


def _tuned(job: TuneJob, outcome: TuneOutcome, prompts: frozenset[int]) -> dict[str, Value]:
    """What is written into the file."""
    kinds = sorted({answer.api for answer in outcome.before.answers})
    values = {
        "source": Value.of(ValueType.STRING, job.drafter.name),
        "date": Value.of(ValueType.STRING, datetime.now(UTC).strftime("%Y-%m-%d")),
        "kinds": Value.of(ValueType.STRING, ",".join(kinds)),
        "tokens": Value.of(ValueType.UINT64, outcome.num_learned),
        PROMPTS: Value.array(ValueType.UINT32, tuple(sorted(prompts))),
    }
    for name, measured in (("before", outcome.before), ("after", outcome.after)):
        if (found := acceptance_of(measured.answers)) is not None:
            rates = tuple(estimate.value for estimate in found.unconditional)
            values[f"acceptance_{name}"] = Value.array(ValueType.FLOAT32, rates)
    return values


def _first(answers: Sequence[RecordedAnswer], num_tokens: int) -> list[RecordedAnswer]:
    """The first answers that have a number of tokens together."""
    found: list[RecordedAnswer] = []
    for answer in answers:
        if num_tokens <= 0:
            break
        found.append(answer)
        num_tokens -= len(answer.tokens)
    return found


def _shown(at: TrainingProgress) -> str:
    loss = "" if math.isnan(at.loss) else f", loss {at.loss:.2f}"
    rate = f"{at.tokens_per_s:.0f} tokens a second"
    return f"learning: step {at.step} of {at.num_steps}, {rate}{loss}, {at.watched:.3f} accepted a window"
