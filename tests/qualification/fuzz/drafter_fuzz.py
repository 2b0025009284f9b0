"""Fuzzing with damaged drafter files.

An EAGLE-3 drafter and drafters of blocks with random weights are made for the model, and assistants for tiny
models of Gemma 4. If the model brings a head for multi-token prediction, that takes turns with them.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType

from mesh.draft.assistant_trial import draft_beside_blank
from mesh.draft.drafter import loadable_file, own_head, read_drafter, with_drafter
from mesh.draft.loading import SETUP
from mesh.text.tokenizer import Tokenizer, num_shared_tokens
from spanmesh_proto.errors import InvalidModel, MeshError, StageFailed
from speculative.draft.context import DraftFile, DraftOptions, DraftUnusable
from speculative.draft.kinds import load_context
from speculative.draft.worker import LoadedDrafter
from speculative.proposer import DrafterKind, FeatureReader
from stages.certification.certify import cut_stage
from stages.files import ModelFile, Region, atomic_write
from stages.gguf import Value, ValueType, read_header
from stages.layers import LayerRange
from stages.runtime.assistant import DraftStart
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.sampling.sampler import SamplingParams
from stages.sampling.verifier import WindowVerifier
from stages.serving.composition import assistant_beside
from stages.slicing.layout import StageLayout, StageTensor
from stages.slicing.model_facts import read_model_facts
from stages.slicing.stage_writer import StageWriter
from tests.qualification.fuzz.gguf_fuzz import first_of, hostile_files, small_layout, with_rows, write_layout
from tests.qualification.fuzz.isolated_trial import judge, run_trial, trials
from tests.qualification.fuzz.report import Tally
from tests.qualification.own_models import OWN_MODELS
from tests.support.assistant_files import write_assistant
from tests.support.block_drafters import BlockDrafter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.context import ForkServerContext

    from numpy.typing import NDArray

    from mesh.draft.drafter import Drafter
    from speculative.draft.worker import DraftProposer
    from stages.runtime.assistant import Assistant
    from stages.slicing.model_facts import ModelFacts
    from tests.qualification.fuzz.isolated_trial import Trial
    from tests.qualification.fuzz.report import FuzzOptions, FuzzReport

# Of the drafter that is made: its width, heads, those with keys, and inner width.
_N_EMBD: Final = 64
_NUM_HEADS: Final = 4
_NUM_KV_HEADS: Final = 2
_N_FF: Final = 128
# Token ids of the model, and those of them that the drafter drafts.
_NUM_TOKENS: Final = 1024
_NUM_OWN_TOKENS: Final = 256
_MEMORY_BYTES: Final = 6 * 2**30
_OPTIONS: Final = DraftOptions(ctx_size=256, num_sessions=2)
_PROMPT: Final = tuple(range(3, 19))
_NUM_DRAFTED: Final = 4
_ASSISTED: Final = ("gemma4-dense", "gemma4-e")
_SAMPLINGS: Final = (SamplingParams(), SamplingParams(0.8, seed=5, repetition_penalty=1.1))
_STAGE: Final = RuntimeOptions(num_slots=len(_SAMPLINGS), ctx_size=256, has_reader=True)
# A drafter may find nothing to say; a good one says it long before.
_DRAFT_WAIT_S: Final = 2.0
_ALIGNMENT: Final = 32


class Pair(NamedTuple):
    """A model, and a good drafter for it."""

    target: Path
    drafter: Path


def fuzz_drafters(options: FuzzOptions) -> FuzzReport:
    """Whatever a drafter's file says, it drafts or is refused with one of our errors.

    llama.cpp may abort when it is loaded first, which is in a process made for the purpose. An abort before,
    or afterwards, would end the head, and is a failure.

    Args:
        options: Options of the run; drafters are made for its model.

    Raises:
        ModelError: If the model cannot be read, or a head for it cannot be drafted with as it is.
    """
    tally = Tally("drafters", options, time.monotonic)
    with TemporaryDirectory(prefix="spanmesh-fuzz-") as name:
        folder = Path(name)
        target = folder / "target.gguf"
        facts = read_model_facts(options.model)
        write_layout(
            options.model,
            small_layout(options.model, num_layers=facts.n_layers, num_tokens=_NUM_TOKENS),
            target,
        )
        pairs = [Pair(target, write_eagle3(target, folder / "eagle3.gguf", options.seed))]
        pairs += [
            Pair(target, BlockDrafter(kind, seed=options.seed).write(target, folder / f"{kind.value}.gguf"))
            for kind in (DrafterKind.DFLASH, DrafterKind.DSPARK, DrafterKind.DFLASH2)
        ]
        pairs += assistant_pairs(folder, options.seed)
        if (head := own_head(facts)) is not None:
            pairs.append(Pair(target, _write_small_head(head, options.model, folder)))
        try_damaged(pairs, options, tally, folder)
    return tally.report()


def try_damaged(pairs: Sequence[Pair], options: FuzzOptions, tally: Tally, folder: Path) -> None:
    """Try damaged files of one drafter after the other, and count what becomes of them.

    Args:
        pairs: The drafters.
        options: Seed, and number of files.
        tally: Counts.
        folder: For files.
    """
    # Not for secrets: the same seed must make the same files.
    random = Random(options.seed)
    context = trials()
    path = folder / "drafter.gguf"
    files = [hostile_files(pair.drafter.read_bytes(), _layout_of(pair.drafter), random) for pair in pairs]
    turns = itertools.cycle(zip(pairs, files, strict=True))
    for pair, hostile in itertools.islice(turns, options.num_cases):
        data = next(hostile)
        path.write_bytes(data)
        judge(tally, try_drafter(context, path, pair.target, folder), data)


def assistant_pairs(folder: Path, seed: int) -> list[Pair]:
    """Tiny models of Gemma 4, dense and of E2B's kind, with an assistant.

    Args:
        folder: For their files.
        seed: Of the assistant's weights.
    """
    assistant = write_assistant(folder / "assistant.gguf", seed=seed)
    return [Pair(OWN_MODELS[name](1).write(folder / f"{name}.gguf"), assistant) for name in _ASSISTED]


def try_drafter(context: ForkServerContext, path: Path, target: Path, folder: Path) -> Trial:
    """Take a drafter as serving does, and draft with it.

    Args:
        context: From `trials`.
        path: Its file.
        target: The model.
        folder: For the file that it is completed to.
    """
    return run_trial(context, _attempt, (path, target, folder), memory_bytes=_MEMORY_BYTES)


def _attempt(begin: Callable[[str], None], path: Path, target: Path, folder: Path) -> None:
    begin("reading")
    facts = read_model_facts(target)
    drafter = read_drafter(path, facts)
    if drafter.is_beside_tail:
        begin("placing")
        beside = with_drafter(facts, drafter, _OPTIONS.num_sessions)
        begin("loading")
        draft_beside_blank(path, target, lambda *_: None)
        begin("drafting beside a stage")
        _draft_beside_stages(path, target, folder, max(beside.allowed_cuts))
        return
    begin("completing")
    loaded = loadable_file(drafter, target, folder)
    begin("loading")
    tokenizer = Tokenizer(target)
    file = DraftFile(drafter.kind, loaded, _OPTIONS, tokenizer.n_vocab, drafter.feature_width)
    try:
        context = load_context(file, SETUP)
    except DraftUnusable as error:
        raise InvalidModel(str(error)) from None
    with contextlib.ExitStack() as on_refusal:
        on_refusal.callback(context.close)
        begin("vocabulary")
        num_shared_tokens(Tokenizer(loaded).vocabulary(), tokenizer.vocabulary())
        on_refusal.pop_all()
    begin("drafting")
    model = LoadedDrafter(file, context, clock_s=time.monotonic)
    proposer = model.open(lambda logits, _position, _tokens: int(np.argmax(logits)))
    # A drafter that fails, as with logits that are no numbers, is switched off for its session.
    with contextlib.suppress(DraftUnusable, ValueError):
        _draft(proposer, drafter)
    proposer.close()
    model.close()


def _draft(proposer: DraftProposer, drafter: Drafter) -> None:
    is_ready = threading.Event()
    proposer.listen(is_ready.set)
    proposer.extend(_PROMPT)
    if isinstance(proposer, FeatureReader):
        shape = (len(_PROMPT) - 1, drafter.feature_width)
        rows = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        proposer.take_features(0, rows)
    deadline_s = time.monotonic() + _DRAFT_WAIT_S
    while len(proposer.propose(_NUM_DRAFTED).tokens) < _NUM_DRAFTED:
        is_ready.wait(0.01)
        is_ready.clear()
        if time.monotonic() > deadline_s:
            return


def _draft_beside_stages(path: Path, target: Path, folder: Path, cut: int) -> None:
    """Draft beside the last stage, with the KV cache that the trial has and with another one."""
    stage = folder / f"tail-of-{target.name}"
    if not stage.exists():
        cut_stage(target, LayerRange(cut, read_model_facts(target).n_layers), stage)
    for options in (_STAGE, replace(_STAGE, kv_type="q8_0")):
        plain = StageRuntime(stage, replace(options, has_reader=False))
        with contextlib.closing(plain), contextlib.closing(StageRuntime(stage, options)) as runtime:
            expected = _last_logits(plain)
            assistant = assistant_beside(runtime, path)
            assert not isinstance(assistant, MeshError), f"{path.name} was tried, and fails: {assistant}"
            for _ in range(2):
                if not np.array_equal(_last_logits(runtime), expected):
                    raise RuntimeError("the stage computes otherwise with the assistant")
                _draft_beside(assistant, runtime)


def _last_logits(runtime: StageRuntime) -> NDArray[np.float32]:
    """Logits behind a prompt in each slot."""
    noise = np.random.default_rng(0)
    hidden = noise.standard_normal((len(_PROMPT), runtime.info.n_embd)).astype(np.float32)
    spans = [Span(slot, 0, list(_PROMPT), hidden, 1) for slot in range(runtime.num_slots)]
    return np.concatenate(runtime.decode(spans))


def _draft_beside(assistant: Assistant, runtime: StageRuntime) -> None:
    verifiers = [
        WindowVerifier(sampling, num_prompt=len(_PROMPT), cached=_PROMPT[:-1]) for sampling in _SAMPLINGS
    ]
    states = np.random.default_rng(1).standard_normal((runtime.num_slots, runtime.info.n_embd))
    starts = [
        DraftStart(slot, len(_PROMPT) - 1, _PROMPT[-1], state.astype(np.float32), _NUM_DRAFTED)
        for slot, state in enumerate(states)
    ]
    texts = [[start.token] for start in starts]

    def draw(index: int, _count: int, logits: NDArray[np.float32]) -> int | None:
        try:
            texts[index].append(verifiers[index].foretell(logits, texts[index], starts[index].position))
        except MeshError:  # logits that are no numbers
            return None
        return texts[index][-1]

    # It is done without one that fails.
    with contextlib.suppress(StageFailed):
        assistant.draft(starts, draw)


def write_eagle3(target: Path, output: Path, seed: int) -> Path:
    """Write an EAGLE-3 drafter with random weights.

    Args:
        target: The model that it drafts for.
        output: Its file.
        seed: Of the weights.

    Raises:
        ModelError: If the model cannot be read, or the file not be written.
    """
    model = read_model_facts(target)
    random = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {
        name: 0.05 * random.standard_normal(shape[::-1]).astype(np.float32)
        for name, shape in _eagle3_shapes(model).items()
    }
    tensors["d2t"] = np.sort(random.choice(model.n_vocab, _NUM_OWN_TOKENS, replace=False)).astype(np.int64)
    raw = output.with_suffix(".weights")
    layouts, offset = [], 0
    with raw.open("wb") as file:
        for name, values in tensors.items():
            kind = GGMLQuantizationType.I64 if name == "d2t" else GGMLQuantizationType.F32
            region = Region(0, offset, values.nbytes)
            layouts.append(StageTensor(name, values.shape[::-1], kind, values.nbytes, region))
            file.write(values.tobytes())
            offset += values.nbytes
    metadata = _eagle3_metadata(model) | {
        key: value for key, value in read_header(target).metadata.items() if key.startswith("tokenizer.")
    }
    with ModelFile(raw) as reader, atomic_write(output) as file:
        StageWriter(reader, file, lambda _count: None).write(
            StageLayout(_ALIGNMENT, metadata, tuple(layouts))
        )
    return output


def _eagle3_shapes(model: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Shapes of its tensors, fastest dimension first."""
    head = _N_EMBD // _NUM_HEADS
    return {
        "token_embd.weight": (_N_EMBD, model.n_vocab),
        "fc.weight": (3 * model.n_embd, _N_EMBD),
        "output_norm.weight": (_N_EMBD,),
        "output.weight": (_N_EMBD, _NUM_OWN_TOKENS),
        "blk.0.attn_norm.weight": (_N_EMBD,),
        "blk.0.attn_norm_2.weight": (_N_EMBD,),
        "blk.0.attn_q.weight": (2 * _N_EMBD, head * _NUM_HEADS),
        "blk.0.attn_k.weight": (2 * _N_EMBD, head * _NUM_KV_HEADS),
        "blk.0.attn_v.weight": (2 * _N_EMBD, head * _NUM_KV_HEADS),
        "blk.0.attn_output.weight": (_N_EMBD, _N_EMBD),
        "blk.0.ffn_norm.weight": (_N_EMBD,),
        "blk.0.ffn_gate.weight": (_N_EMBD, _N_FF),
        "blk.0.ffn_up.weight": (_N_EMBD, _N_FF),
        "blk.0.ffn_down.weight": (_N_FF, _N_EMBD),
    }


def _eagle3_metadata(model: ModelFacts) -> dict[str, Value]:
    integers = {
        "block_count": 1,
        "context_length": 8192,
        "embedding_length": _N_EMBD,
        "feed_forward_length": _N_FF,
        "vocab_size": model.n_vocab,
        "target_hidden_size": model.n_embd,
        "attention.head_count": _NUM_HEADS,
        "attention.head_count_kv": _NUM_KV_HEADS,
        "rope.dimension_count": _N_EMBD // _NUM_HEADS,
    }
    read = (1, model.n_layers // 2, model.n_layers - 1)
    return {
        "general.architecture": Value.of(ValueType.STRING, "eagle3"),
        **{f"eagle3.{key}": Value.of(ValueType.UINT32, value) for key, value in integers.items()},
        "eagle3.attention.layer_norm_rms_epsilon": Value.of(ValueType.FLOAT32, 1e-5),
        "eagle3.rope.freq_base": Value.of(ValueType.FLOAT32, 1e4),
        "eagle3.target_layers": Value.array(ValueType.INT32, read),
        "eagle3.norm_before_residual": Value.of(ValueType.BOOL, value=False),
    }


def _write_small_head(head: Drafter, model: Path, folder: Path) -> Path:
    """Write the model's own head for as many tokens as the small target has."""
    whole = loadable_file(head, model, folder)
    layout = _layout_of(whole)
    metadata = {
        key: first_of(value, _NUM_TOKENS) if key.startswith("tokenizer.") else value
        for key, value in layout.metadata.items()
    }
    small = folder / "head.gguf"
    tensors = tuple(with_rows(tensor, _NUM_TOKENS) for tensor in layout.tensors)
    write_layout(whole, replace(layout, metadata=metadata, tensors=tensors), small)
    return small


def _layout_of(path: Path) -> StageLayout:
    header = read_header(path)
    return StageLayout(
        header.alignment,
        header.metadata,
        tuple(
            StageTensor(
                tensor.name, tensor.shape, tensor.type, tensor.n_bytes,
                Region(tensor.file, tensor.offset_bytes, tensor.n_bytes),
            )
            for tensor in header.tensors.values()
        ),
    )  # fmt: skip
