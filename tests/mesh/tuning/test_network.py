"""The network of drafters: a plain computation, llama.cpp's own drafts, batches."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mesh.draft.drafter import loadable_file
from mesh.draft.loading import SETUP
from mesh.text.tokenizer import Tokenizer
from mesh.tuning.acceptance import NUM_DRAFTED
from mesh.tuning.conversation_file import Conversation, write_conversation
from mesh.tuning.jobs import Device, Schedule, TuneJob
from mesh.tuning.recording import conversation_path, create_recording
from mesh.tuning.source import Source
from spanmesh_proto.errors import ModelError
from speculative.draft.context import DraftFile, DraftOptions, SlotRows
from speculative.draft.kinds import KINDS
from speculative.draft.session import FeatureSpan
from speculative.proposer import DrafterKind
from stages.runtime.llama import init_backend
from tests.support.eagle3 import DRAFTER
from tests.support.recordings import greedy_with_features, info, random_conversation
from tests.support.tiny_eagle3 import TinyEagle3
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from mesh.tuning.drafter_file import Eagle3Weights

torch = pytest.importorskip("torch", reason="torch is not installed: make environment")

from mesh.tuning.network import MOST_CHAINS, Compute, Network, make_batch, make_lexicon, num_chains  # noqa: E402
from mesh.tuning.work import tune_here  # noqa: E402

CPU = Compute("cpu", is_bf16=False)
SHAPES = (
    TinyEagle3(),
    TinyEagle3(norm_before_fc=False, norm_before_residual=True, has_rope_factors=True, n_rot=8),
    TinyEagle3(own_width=32, head_width=8, n_rot=8, num_own_tokens=320, n_heads_kv=1, scaling="linear"),
)


def tiny(shape: TinyEagle3, folder: Path) -> Source:
    target = TinyModel("llama", is_float=True).write(folder / "target.gguf")
    return Source(target, shape.write(target, folder / "drafter.gguf"))


def network_of(source: Source, conversations: Sequence[Conversation]) -> tuple[Network, Any]:
    tokens: list[NDArray[Any]] = [source.weights.token_ids, *(each.token_ids for each in conversations)]
    lexicon = make_lexicon(source.embedding, np.concatenate(tokens), source.facts.n_vocab)
    return Network(source.weights, lexicon, CPU), lexicon


def drafts(source: Source, conversation: Conversation) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids that all chains draft, [steps, chains], and their states, [steps, chains, n_embd]."""
    network, lexicon = network_of(source, [conversation])
    known = np.argsort(lexicon.row_of)[-len(lexicon.embedding) :]
    batch = make_batch([conversation], lexicon, NUM_DRAFTED, "cpu")
    with torch.no_grad():
        steps = list(network.chain(batch, NUM_DRAFTED, drafts=True))
    ids = [known[step.drafted[0].numpy()] for step in steps if step.drafted is not None]
    return np.array(ids), np.array([step.state[0].numpy() for step in steps])


class Plain:
    """The same drafter row by row, by its definition."""

    def __init__(self, source: Source) -> None:
        self._weights: Eagle3Weights = source.weights
        self._embedding = source.embedding.rows()
        self._keys: dict[int, NDArray[np.float64]] = {}
        self._values: dict[int, NDArray[np.float64]] = {}

    def encoded(self, features: NDArray[Any]) -> NDArray[np.float64]:
        row = features.reshape(-1).astype(np.float64)
        if self._weights.shape.norm_before_fc:
            row = self._normed(row, "enc.output_norm.weight")
        encoded: NDArray[np.float64] = self._trained("fc.weight") @ row
        return encoded

    def step(self, token: int, row: NDArray[np.float64], position: int) -> NDArray[np.float64]:
        """State of a row, which sees those of all positions before and itself."""
        shape = self._weights.shape
        normed = self._normed(row, "blk.0.attn_norm_2.weight")
        read = np.concatenate([self._normed(self._embedding[token], "blk.0.attn_norm.weight"), normed])
        query = self._rotated(self._trained("blk.0.attn_q.weight") @ read, position)
        self._keys[position] = self._rotated(self._trained("blk.0.attn_k.weight") @ read, position)
        self._values[position] = (self._trained("blk.0.attn_v.weight") @ read).reshape(-1, shape.head_width)
        found = []
        for head in range(shape.n_heads):
            of = head // (shape.n_heads // shape.n_heads_kv)
            seen = range(position + 1)
            scores = np.array([query[head] @ self._keys[at][of] for at in seen]) / np.sqrt(shape.head_width)
            shares = np.exp(scores - scores.max())
            found.append(shares / shares.sum() @ np.array([self._values[at][of] for at in seen]))
        state = normed if shape.norm_before_residual else row
        state = state + self._trained("blk.0.attn_output.weight") @ np.concatenate(found)
        inner = self._normed(state, "blk.0.ffn_norm.weight")
        gate = self._trained("blk.0.ffn_gate.weight") @ inner
        up = self._trained("blk.0.ffn_up.weight") @ inner
        fed: NDArray[np.float64] = self._trained("blk.0.ffn_down.weight") @ (gate / (1 + np.exp(-gate)) * up)
        after: NDArray[np.float64] = state + fed
        return after

    def logits(self, state: NDArray[np.float64]) -> NDArray[np.float64]:
        head = self._weights.head.astype(np.float64)
        logits: NDArray[np.float64] = head @ self._normed(state, "output_norm.weight")
        return logits

    def drafted(self, state: NDArray[np.float64]) -> int:
        return int(self._weights.token_ids[self.logits(state).argmax()])

    def _trained(self, name: str) -> NDArray[np.float64]:
        return self._weights.trained[name].astype(np.float64)

    def _normed(self, row: NDArray[Any], name: str) -> NDArray[np.float64]:
        scale = np.sqrt((row.astype(np.float64) ** 2).mean() + self._weights.shape.norm_eps)
        normed: NDArray[np.float64] = row / scale * self._trained(name)
        return normed

    def _rotated(self, row: NDArray[np.float64], position: int) -> NDArray[np.float64]:
        shape = self._weights.shape
        heads = row.reshape(-1, shape.head_width).copy()
        for pair in range(shape.n_rot // 2):
            angle = position * shape.rope_scale * shape.rope_base ** (-2 * pair / shape.n_rot)
            if self._weights.rope_factors is not None:
                angle /= self._weights.rope_factors[pair]
            turned = (heads[:, 2 * pair] + 1j * heads[:, 2 * pair + 1]) * np.exp(1j * angle)
            heads[:, 2 * pair], heads[:, 2 * pair + 1] = turned.real, turned.imag
        return heads


@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_a_chain_is_what_its_definition_says(shape: TinyEagle3, tmp_path: Path) -> None:
    source, conversation = tiny(shape, tmp_path), random_conversation(1)
    ids, states = drafts(source, conversation)
    first = conversation.info.answer_start - 1
    for chain in range(ids.shape[1]):
        plain = Plain(source)
        for row in range(first + chain + 1):
            encoded = plain.encoded(conversation.features[row])
            state = plain.step(int(conversation.token_ids[row + 1]), encoded, row)
        for step in range(NUM_DRAFTED):
            np.testing.assert_allclose(states[step, chain], state, rtol=1e-3, atol=1e-3)
            assert ids[step, chain] == plain.drafted(state)
            state = plain.step(int(ids[step, chain]), state, first + chain + step + 1)


def llama_drafts(source: Source, conversation: Conversation, folder: Path) -> NDArray[np.int64]:
    """Ids that llama.cpp drafts behind each row from which a chain begins, [steps, chains]."""
    init_backend()
    target = source.facts.path
    path = loadable_file(source.drafter, target, folder)
    n_vocab = Tokenizer(target).n_vocab
    file = DraftFile(
        DrafterKind.EAGLE3, path, DraftOptions(ctx_size=512), n_vocab, source.drafter.feature_width
    )
    tokens = conversation.token_ids.tolist()
    rows = conversation.features.reshape(len(conversation.features), -1).astype(np.float32)
    first = conversation.info.answer_start - 1
    found = []
    with contextlib.closing(KINDS[DrafterKind.EAGLE3].context(file, SETUP)) as context:
        for row in range(first, first + num_chains(conversation, NUM_DRAFTED)):
            span = FeatureSpan(
                1, tuple(tokens[1 : row + 2]), rows[: row + 1], None, has_output=True, is_anew=True
            )
            drafted: list[int] = []
            for step in range(NUM_DRAFTED):
                outputs = context.decode([SlotRows(0, span)], contextlib.nullcontext())
                assert outputs is not None
                assert outputs[0] is not None
                assert outputs[0].state is not None
                drafted.append(int(outputs[0].values[0].argmax()))
                span = FeatureSpan(
                    row + 2 + step,
                    (drafted[-1],),
                    rows[:0],
                    outputs[0].state.copy(),
                    has_output=True,
                    is_anew=False,
                )
            found.append(drafted)
    return np.array(found).T


@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_chains_draft_what_llama_cpp_drafts(shape: TinyEagle3, tmp_path: Path) -> None:
    source, conversation = tiny(shape, tmp_path), random_conversation(2, 32)
    theirs = llama_drafts(source, conversation, tmp_path)
    ours, _ = drafts(source, conversation)
    assert ours.shape == theirs.shape == (NUM_DRAFTED, 24)
    # Its cache holds keys in f16, which turns a close choice now and then.
    assert (ours[0] == theirs[0]).mean() >= 0.95
    assert (ours == theirs).mean() >= 0.9


@pytest.fixture(name="real", scope="module")
def _real(smollm2_path: Path) -> Conversation:
    """An answer of the demo's model with the features that its drafter reads."""
    text = "<|im_start|>user\nCount from one to twenty.<|im_end|>\n<|im_start|>assistant\n"
    prompt = Tokenizer(smollm2_path).encode(text, add_special=False, parse_special=True)
    layers = Source(smollm2_path, DRAFTER).recorded.layers
    token_ids, features = greedy_with_features(smollm2_path, prompt, 60, layers)
    return Conversation(info(0, answer_start=len(prompt)), token_ids, features)


@pytest.mark.model
def test_the_demo_s_drafter_drafts_alike_from_real_features(
    real: Conversation, smollm2_path: Path, tmp_path: Path
) -> None:
    source, num_prompt = Source(smollm2_path, DRAFTER), real.info.answer_start
    some = Conversation(real.info, real.token_ids[: num_prompt + 40], real.features[: num_prompt + 39])
    theirs = llama_drafts(source, some, tmp_path)
    ours, _ = drafts(source, some)
    # It is in Q4_0: llama.cpp rounds what it multiplies with, too.
    assert (ours[0] == theirs[0]).mean() >= 0.9
    truth = np.array(
        [some.token_ids[num_prompt + 1 + step :][: ours.shape[1]] for step in range(NUM_DRAFTED)]
    )
    rates = [(drafted == truth).cumprod(0).mean(1) for drafted in (ours, theirs)]
    assert rates[1][0] >= 0.25
    np.testing.assert_allclose(rates[0], rates[1], atol=0.06)


@pytest.mark.model
def test_features_that_do_not_belong_to_the_tokens_are_refused(
    real: Conversation, smollm2_path: Path, tmp_path: Path
) -> None:
    # The rows of other positions, as if sessions had been mixed up.
    mixed = np.random.default_rng(1).permutation(real.features)
    folder, output = tmp_path / "recording", tmp_path / "tuned.gguf"
    create_recording(folder, Source(smollm2_path, DRAFTER).recorded)
    for number in range(12):
        # Twelve prompts.
        token_ids = np.concatenate([np.array([number], np.int32), real.token_ids[1:]])
        written = Conversation(info(number, answer_start=real.info.answer_start), token_ids, mixed)
        write_conversation(conversation_path(folder, number), written)
    job = TuneJob((folder,), smollm2_path, DRAFTER, output, Schedule(), Device(), None, is_resumed=False)
    with pytest.raises(ModelError, match="features and tokens do not belong together"):
        tune_here(job, lambda _what, _share: None)
    assert not output.with_name("tuned.gguf.run").exists()


def test_conversations_side_by_side_are_as_alone(tmp_path: Path) -> None:
    source = tiny(SHAPES[0], tmp_path)
    conversations = [
        random_conversation(1, 40),
        random_conversation(2, 16),
        random_conversation(3, 30, start=5),
    ]
    network, lexicon = network_of(source, conversations)
    together = network.num_right(make_batch(conversations, lexicon, NUM_DRAFTED, "cpu"))
    for each, found in zip(conversations, together, strict=True):
        (alone,) = network.num_right(make_batch([each], lexicon, NUM_DRAFTED, "cpu"))
        np.testing.assert_array_equal(found, alone)
        assert len(alone) == num_chains(each, NUM_DRAFTED)


def test_a_loss_is_the_mean_cross_entropy_of_tokens_that_can_be_drafted(tmp_path: Path) -> None:
    source, conversation = tiny(SHAPES[0], tmp_path), random_conversation(3)
    network, lexicon = network_of(source, [conversation])
    loss = float(network.loss(make_batch([conversation], lexicon, 1, "cpu"), 1).detach())
    plain, first = Plain(source), conversation.info.answer_start - 1
    surprises = []
    for row in range(len(conversation.token_ids) - 2):
        state = plain.step(
            int(conversation.token_ids[row + 1]), plain.encoded(conversation.features[row]), row
        )
        (label,) = np.nonzero(source.weights.token_ids == conversation.token_ids[row + 2])
        if row >= first and len(label):
            logits = plain.logits(state)
            surprises.append(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[label[0]])
    assert 5 < len(surprises) < len(conversation.token_ids) - 2 - first
    assert loss == pytest.approx(float(np.mean(surprises)), rel=1e-3)


def test_what_drafts_right_is_counted(tmp_path: Path) -> None:
    source, conversation = tiny(SHAPES[0], tmp_path), random_conversation(4)
    ids, _ = drafts(source, conversation)
    # The text becomes what the first chain drafts, three tokens of it.
    at = conversation.info.answer_start + 1
    token_ids = conversation.token_ids.copy()
    token_ids[at : at + 3] = ids[:3, 0]
    token_ids[at + 3] = next(token for token in range(3, 300) if token != ids[3, 0])
    changed = replace(conversation, token_ids=token_ids)
    network, lexicon = network_of(source, [changed])
    (num_right,) = network.num_right(make_batch([changed], lexicon, NUM_DRAFTED, "cpu"))
    assert num_right[0] == 3


def test_a_learned_chain_reads_the_true_tokens(tmp_path: Path) -> None:
    source, conversation = tiny(SHAPES[0], tmp_path), random_conversation(5)
    network, lexicon = network_of(source, [conversation])
    batch = make_batch([conversation], lexicon, 1, "cpu")
    with torch.no_grad():
        steps = [step.state[0].numpy() for step in network.chain(batch, 2, drafts=False)]
    plain, first = Plain(source), conversation.info.answer_start - 1
    for row in range(first + 1):
        state = plain.step(
            int(conversation.token_ids[row + 1]), plain.encoded(conversation.features[row]), row
        )
    np.testing.assert_allclose(steps[0][0], state, rtol=1e-3, atol=1e-3)
    state = plain.step(int(conversation.token_ids[first + 2]), state, first + 1)
    np.testing.assert_allclose(steps[1][0], state, rtol=1e-3, atol=1e-3)


def test_long_answers_are_counted_in_parts(tmp_path: Path) -> None:
    source = tiny(SHAPES[0], tmp_path)
    conversation = random_conversation(6, MOST_CHAINS + 40)
    network, lexicon = network_of(source, [conversation])
    batch = make_batch([conversation], lexicon, NUM_DRAFTED, "cpu")
    (found,) = network.num_right(batch)
    assert len(found) == batch.starts.shape[1] > MOST_CHAINS
    (last,) = network.num_right(batch.part(MOST_CHAINS))
    np.testing.assert_array_equal(found[MOST_CHAINS:], last)
