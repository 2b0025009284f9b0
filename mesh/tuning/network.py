"""The network of an EAGLE-3 drafter in torch: one chain for training and for drafting.

Row j of a conversation has the target's features at position j and token j + 1, and foretells token j + 2.
Step 0 of a chain is computed from features; step s from the output state of step s - 1 and the token behind
the one that step s - 1 foretold: the true one when it learns (training-time test, Li et al. 2025), the
drafted one when it drafts. All rows of an answer are chains at once: the keys and values of rows with
features are shared, those of a chain's own steps are beside them in one softmax.

Tokens are numbered by their row in `Lexicon`, so that embeddings of large vocabularies need not be held.
Positions within a conversation begin at 0: rotations depend on distances alone.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from mesh.tuning.acceptance import NUM_DRAFTED
from mesh.tuning.drafter_file import FEATURE_NORM, Eagle3Weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from mesh.tuning.conversation_file import Conversation
    from mesh.tuning.drafter_file import Eagle3Shape, TensorRows

_NEVER: Final = float("-inf")
MOST_CHAINS: Final = 512
"""Chains of a conversation that are computed at once: attention holds a score for each chain and row."""
# Loss of each further step of a chain counts for less, as in EAGLE-3's own training.
_DECAY: Final = 0.8


@dataclass(frozen=True, eq=False)
class Lexicon:
    """The tokens of recordings and of a drafter, with their embeddings."""

    row_of: NDArray[np.int64]
    """[n_vocab]: row of a token id; -1 for tokens that occur nowhere."""
    embedding: NDArray[np.float32]
    """[rows, n_embd]."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Conversations side by side, padded at their ends."""

    tokens: Tensor
    """[conversations, length], int64: rows of the lexicon."""
    features: Tensor
    """[conversations, rows, width], float32."""
    starts: Tensor
    """[conversations, chains], int64: row at which each chain begins."""
    is_chain: Tensor
    """[conversations, chains], bool: False where padded."""
    lengths: Tensor
    """[conversations, 1], int64: tokens of each."""

    def part(self, first: int) -> Batch:
        """The same with `MOST_CHAINS` chains of each conversation at most, from the first one's index on."""
        some = slice(first, first + MOST_CHAINS)
        return replace(self, starts=self.starts[:, some], is_chain=self.is_chain[:, some])


@dataclass(frozen=True)
class Compute:
    """Where and how it is computed."""

    device: str
    is_bf16: bool
    """Whether matrix products are in bfloat16."""

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Context of all matrix products.

        Weights are turned into bfloat16 once in a context, and without their gradients if that happens
        under `no_grad`: what learns and what does not need contexts of their own.
        """
        if not self.is_bf16:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = torch.autocast(
            self.device.partition(":")[0], dtype=torch.bfloat16
        )
        return context


@dataclass(frozen=True)
class ChainStep:
    """One step of all chains of a batch."""

    index: int
    """Number of the step, from 0."""
    state: Tensor
    """[conversations, chains, n_embd], float32."""
    drafted: Tensor | None
    """[conversations, chains], int64: rows of the lexicon that it drafts; None where it learns."""


class Network:
    """A drafter on a device.

    Args:
        weights: Its weights.
        lexicon: Embeddings of its tokens, and of those of all conversations.
        compute: Where it computes.

    Attributes:
        parameters: What is trained, by the names in the file; float32.
    """

    def __init__(self, weights: Eagle3Weights, lexicon: Lexicon, compute: Compute) -> None:
        self.compute = compute
        self._shape = weights.shape
        self._source = weights
        self.parameters: dict[str, Tensor] = {
            name: torch.tensor(array, device=compute.device, requires_grad=True)
            for name, array in weights.trained.items()
        }
        frozen = torch.bfloat16 if compute.is_bf16 else torch.float32
        self._head = torch.tensor(weights.head, device=compute.device).to(frozen)
        self._embedding = torch.tensor(lexicon.embedding, device=compute.device)
        own_rows = lexicon.row_of[weights.token_ids]
        labels = np.full(len(lexicon.embedding), -1, np.int64)
        labels[own_rows] = np.arange(len(own_rows))
        self._own_rows = torch.tensor(own_rows, device=compute.device)
        self._labels = torch.tensor(labels, device=compute.device)
        self._frequencies = _frequencies(weights, compute.device)

    def weights(self) -> Eagle3Weights:
        """Its present weights."""
        trained = {name: _as_array(tensor) for name, tensor in self.parameters.items()}
        source = self._source
        return Eagle3Weights(source.shape, trained, source.head, source.token_ids, source.rope_factors)

    def set_parameters(self, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Replace what is trained."""
        with torch.no_grad():
            for name, tensor in self.parameters.items():
                tensor.copy_(torch.from_numpy(arrays[name]))

    def chain(self, batch: Batch, num_steps: int, *, drafts: bool) -> Iterator[ChainStep]:
        """Compute all chains of a batch, step by step.

        Args:
            batch: The conversations.
            num_steps: Steps of each chain.
            drafts: Whether a step reads what the step before has drafted, and not the true token.
        """
        shape, weight, starts = self._shape, self.parameters, batch.starts
        joined = self._joined(batch.features)
        num_rows = joined.shape[1]
        inputs, residual = self._inputs(batch.tokens[:, 1 : num_rows + 1], joined)
        positions = torch.arange(num_rows, device=starts.device).expand(len(starts), num_rows)
        keys = self._rotated(_heads(F.linear(inputs, weight["blk.0.attn_k.weight"]), shape), positions)
        values = _heads(F.linear(inputs, weight["blk.0.attn_v.weight"]), shape)
        is_later = positions[:, None, :] > starts[..., None]
        inputs, state = _taken(inputs, starts), _taken(residual, starts)
        residual = state
        own: list[tuple[Tensor, Tensor]] = []
        drafted: Tensor | None = None
        for step in range(num_steps):
            if step:
                read = _tokens_at(batch, step + 1) if drafted is None else drafted
                inputs, residual = self._inputs(read, state)
                key = self._rotated(
                    _heads(F.linear(inputs, weight["blk.0.attn_k.weight"]), shape), starts + step
                )
                own.append((key, _heads(F.linear(inputs, weight["blk.0.attn_v.weight"]), shape)))
            query = _heads(F.linear(inputs, weight["blk.0.attn_q.weight"]), shape)
            read_values = _attended(self._rotated(query, starts + step), keys, values, own, is_later)
            state = residual + F.linear(read_values, weight["blk.0.attn_output.weight"])
            state = (state + self._fed_forward(state)).float()
            if drafts:
                drafted = self._own_rows[self.logits(state).argmax(-1)]
            yield ChainStep(step, state, drafted)

    def logits(self, state: Tensor) -> Tensor:
        """Logits of the drafter's own tokens, [..., own tokens], of states [..., n_embd]."""
        return F.linear(self._normed(state, "output_norm.weight").to(self._head.dtype), self._head)

    def loss(self, batch: Batch, num_steps: int) -> Tensor:
        """Cross entropy with the true tokens: the mean of each step's chains, later steps for less.

        Tokens that cannot be drafted are left out.
        """
        total = torch.zeros((), device=batch.starts.device)
        for step in self.chain(batch, num_steps, drafts=False):
            at = batch.starts + 2 + step.index
            labels = self._labels[_tokens_at(batch, 2 + step.index)]
            is_known = batch.is_chain & (at < batch.lengths) & (labels >= 0)
            if not bool(is_known.any()):
                break
            logits = self.logits(step.state[is_known]).float()
            total = total + _DECAY**step.index * F.cross_entropy(logits, labels[is_known])
        return total

    def num_right(self, batch: Batch) -> list[NDArray[np.int64]]:
        """Of `NUM_DRAFTED` tokens that each chain drafts, how many are right: up to the first that is not.

        Returns:
            For each conversation, int64 (chains,).
        """
        with torch.no_grad(), self.compute.autocast():
            parts = [
                self._count_right(batch.part(first)) for first in range(0, batch.starts.shape[1], MOST_CHAINS)
            ]
        counts = torch.cat(parts, 1)
        return [_as_array(row[is_chain]) for row, is_chain in zip(counts, batch.is_chain, strict=True)]

    def _count_right(self, batch: Batch) -> Tensor:
        right = torch.ones_like(batch.is_chain)
        count = torch.zeros_like(batch.starts)
        for step in self.chain(batch, NUM_DRAFTED, drafts=True):
            right = right & (step.drafted == _tokens_at(batch, 2 + step.index))
            count = count + right
        return count

    def _joined(self, features: Tensor) -> Tensor:
        """[conversations, rows, n_embd], float32, of features of all layers."""
        if self._shape.norm_before_fc:
            features = self._normed(features, FEATURE_NORM)
        return F.linear(features, self.parameters["fc.weight"]).float()

    def _inputs(self, tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads of tokens and of the rows before them, and what is added to its result."""
        embedded = self._normed(self._embedding[tokens], "blk.0.attn_norm.weight")
        normed = self._normed(rows, "blk.0.attn_norm_2.weight")
        residual = normed if self._shape.norm_before_residual else rows
        return torch.cat([embedded, normed], -1), residual

    def _fed_forward(self, state: Tensor) -> Tensor:
        weight = self.parameters
        normed = self._normed(state, "blk.0.ffn_norm.weight")
        gate = F.silu(F.linear(normed, weight["blk.0.ffn_gate.weight"]))
        up = F.linear(normed, weight["blk.0.ffn_up.weight"])
        return F.linear(gate * up, weight["blk.0.ffn_down.weight"])

    def _normed(self, values: Tensor, name: str) -> Tensor:
        weight = self.parameters[name]
        return F.rms_norm(values.float(), (values.shape[-1],), weight, self._shape.norm_eps)

    def _rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Heads [conversations, heads, rows, width] at positions [conversations, rows].

        Neighbouring values are pairs, as llama.cpp rotates those of this architecture.
        """
        angles = positions[:, None, :, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        turned, rest = heads.float().split([self._shape.n_rot, heads.shape[-1] - self._shape.n_rot], -1)
        even, odd = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
        return torch.cat([pairs.flatten(-2), rest], -1)


def make_lexicon(embedding: TensorRows, token_ids: NDArray[np.integer[Any]], n_vocab: int) -> Lexicon:
    """Embeddings of some tokens.

    Args:
        embedding: All rows.
        token_ids: Ids of the model, in any order and number.
        n_vocab: Tokens of the model.
    """
    known = np.unique(token_ids)
    row_of = np.full(n_vocab, -1, np.int64)
    row_of[known] = np.arange(len(known))
    return Lexicon(row_of, embedding.rows(known))


def num_chains(conversation: Conversation, num_ahead: int) -> int:
    """Chains of a conversation behind each of which a number of tokens is known; see `make_batch`."""
    first, stop = _chain_rows(conversation, num_ahead)
    return max(0, stop - first)


def make_batch(conversations: Sequence[Conversation], lexicon: Lexicon, num_ahead: int, device: str) -> Batch:
    """Conversations side by side.

    Args:
        conversations: Of one model.
        lexicon: Its tokens.
        num_ahead: Tokens behind each chain's first that are known: 1 or more.
        device: Where to.
    """
    num_tokens = [len(each.token_ids) - each.info.start for each in conversations]
    num_rows = [len(each.features) for each in conversations]
    width = math.prod(conversations[0].features.shape[1:])
    spans = [_chain_rows(each, num_ahead) for each in conversations]
    most = max(stop - first for first, stop in spans)
    count = len(conversations)
    tokens = np.zeros((count, max(*num_tokens, max(num_rows) + 1)), np.int64)
    features = np.zeros((count, max(num_rows), width), np.float32)
    starts = np.zeros((count, most), np.int64)
    is_chain = np.zeros((count, most), np.bool_)
    for index, (each, (first, stop)) in enumerate(zip(conversations, spans, strict=True)):
        tokens[index, : num_tokens[index]] = lexicon.row_of[each.token_ids[each.info.start :]]
        features[index, : num_rows[index]] = each.features.reshape(-1, width)
        starts[index, : stop - first] = np.arange(first, stop)
        is_chain[index, : stop - first] = True
    lengths = np.array(num_tokens)[:, None]
    return Batch(
        *(torch.from_numpy(each).to(device) for each in (tokens, features, starts, is_chain, lengths))
    )


def _chain_rows(conversation: Conversation, num_ahead: int) -> tuple[int, int]:
    """Rows of features, from the recording's first, at which chains begin: from the prompt's last one on."""
    start = conversation.info.start
    first = max(0, conversation.info.answer_start - 1 - start)
    known = len(conversation.token_ids) - start - 1 - num_ahead
    return first, max(first, min(len(conversation.features), known))


def _frequencies(weights: Eagle3Weights, device: str) -> Tensor:
    """Angle of each pair at position 1, float32 [n_rot / 2]."""
    shape = weights.shape
    angles = shape.rope_base ** (-np.arange(0, shape.n_rot, 2) / shape.n_rot) * shape.rope_scale
    if weights.rope_factors is not None:
        angles = angles / weights.rope_factors
    return torch.tensor(angles, dtype=torch.float32, device=device)


def _heads(values: Tensor, shape: Eagle3Shape) -> Tensor:
    """[conversations, heads, rows, width] of [conversations, rows, heads × width]."""
    return values.unflatten(-1, (-1, shape.head_width)).transpose(1, 2)


def _attended(
    query: Tensor, keys: Tensor, values: Tensor, own: Sequence[tuple[Tensor, Tensor]], is_later: Tensor
) -> Tensor:
    """Values read by each chain, [conversations, chains, heads × width].

    Args:
        query: [conversations, heads, chains, width].
        keys: [conversations, key heads, rows, width], of rows with features.
        values: Likewise.
        own: Keys and values of each chain's own steps, [conversations, key heads, chains, width].
        is_later: [conversations, chains, rows]: rows that a chain does not see.
    """
    count, num_heads, num_chains_, width = query.shape
    num_key_heads, num_rows = keys.shape[1], keys.shape[2]
    # Heads that share keys side by side.
    query = query.reshape(count, num_key_heads, num_heads // num_key_heads, num_chains_, width)
    scores = (query.flatten(2, 3) @ keys.transpose(-1, -2)).float().unflatten(2, (-1, num_chains_))
    scores = scores.masked_fill(is_later[:, None, None], _NEVER)
    beside = [(query * key[:, :, None]).sum(-1, keepdim=True).float() for key, _ in own]
    shares = torch.softmax(torch.cat([scores, *beside], -1) / math.sqrt(width), -1)
    read = (shares[..., :num_rows].flatten(2, 3).to(values.dtype) @ values).unflatten(2, (-1, num_chains_))
    for index, (_, value) in enumerate(own):
        read = read + shares[..., num_rows + index, None] * value[:, :, None]
    return read.flatten(1, 2).transpose(1, 2).flatten(2)


def _taken(rows: Tensor, indices: Tensor) -> Tensor:
    """Rows [conversations, chains, width] by their indices [conversations, chains]."""
    return rows.gather(1, indices[..., None].expand(*indices.shape, rows.shape[-1]))


def _tokens_at(batch: Batch, distance: int) -> Tensor:
    """Tokens at a distance from each chain's first row; the last one where there is none."""
    return batch.tokens.gather(1, (batch.starts + distance).clamp(max=batch.tokens.shape[1] - 1))


def _as_array(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy().copy()
    return array
