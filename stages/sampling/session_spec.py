"""Session specification: settings that open a session at every stage, and their wire form."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Final

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import InvalidRequest, InvalidWindow
from spanmesh_proto.image_chunk import ImageChunk
from spanmesh_proto.row_ids import has_rows, stray_id
from stages.grammar.gbnf_parser import MAX_GRAMMAR_BYTES, refusal
from stages.runtime.row_positions import TOKENS_ONLY, RowPositions
from stages.sampling.sampler import MAX_TOP_LOGPROBS, SamplingParams

# Fields of `SamplingParams` that its message has by the same names, and of `ImageChunk`.
_SCALARS: Final = tuple(each.name for each in fields(SamplingParams) if each.name != "logit_bias")
_OF_CHUNK: Final = tuple(each.name for each in fields(ImageChunk))


@dataclass(frozen=True)
class Resumed:
    """Former id and positions of a session, after a recovery."""

    session: int = 0
    """Its id in the former ring; 0 for none."""
    num_positions: int = 0
    """First positions that stages of the former ring still hold, as far as they had computed them."""


NOTHING_RESUMED: Final = Resumed()


@dataclass(frozen=True)
class SessionSpec:
    """Settings of one session.

    Raises:
        InvalidRequest: If more log probabilities are requested than a verdict may carry, or the grammar is
            too large.
    """

    session: int
    """Its id; never used twice."""
    slot: int
    """Its slot at every stage."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters."""
    num_prompt: int = 0
    """Number of its first tokens that are the prompt, for penalties over the answer only."""
    num_top_logprobs: int | None = None
    """Number of likeliest tokens that the tail reports with each sampled one; None for no log probabilities.
    """
    cached: tuple[int, ...] = ()
    """Token ids of the cached prefix, whose positions `source_slot` holds."""
    source_slot: int = 0
    """The slot with the cached prefix."""
    resumed: Resumed = NOTHING_RESUMED
    """Former id and positions, after a recovery."""
    grammar: str | None = None
    """GBNF that the answer must match; None for none."""
    fetch: int = 0
    """Id of the fetch that has read the cached prefix from disk at every stage; 0 for none."""
    client: bytes = b""
    """Digest of its client; empty where the API is open."""
    positions: RowPositions = TOKENS_ONLY
    """Positions of its rows."""

    def __post_init__(self) -> None:
        if self.num_top_logprobs is not None and not 0 <= self.num_top_logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs is {self.num_top_logprobs}: it must be from 0 to {MAX_TOP_LOGPROBS}",
                param="top_logprobs",
            )
        if self.grammar is not None and len(self.grammar) > MAX_GRAMMAR_BYTES:
            raise refusal(f"it is larger than {MAX_GRAMMAR_BYTES} bytes: make it smaller")

    def require_vocabulary(self, n_vocab: int) -> None:
        """Check that every token id in it exists.

        Raises:
            InvalidRequest: If one with a bias does not.
            InvalidWindow: If one of the cached prefix does not.
        """
        self.sampling.require_vocabulary(n_vocab)
        for ids, may_be_rows in (
            (self.cached[: self.num_prompt], True),
            (self.cached[self.num_prompt :], False),
        ):
            if (stray := stray_id(ids, n_vocab, may_be_rows=may_be_rows)) is not None:
                raise InvalidWindow(f"token {stray} is outside the vocabulary of {n_vocab}")

    def to_wire(self) -> wire.Open:
        """The message."""
        sampling = self.sampling
        return wire.Open(
            session=self.session,
            slot=self.slot,
            sampling=wire.Sampling(
                **{name: getattr(sampling, name) for name in _SCALARS},
                bias_tokens=[token for token, _ in sampling.logit_bias],
                biases=[bias for _, bias in sampling.logit_bias],
            ),
            num_prompt_tokens=self.num_prompt,
            num_top_logprobs=self.num_top_logprobs,
            cached_tokens=self.cached,
            source_slot=self.source_slot,
            resumed_session=self.resumed.session,
            num_resumed=self.resumed.num_positions,
            grammar=self.grammar or "",
            fetch=self.fetch,
            client=self.client,
            images=map(chunk_to_wire, self.positions.chunks),
        )

    @classmethod
    def from_wire(cls, message: wire.Open) -> SessionSpec:
        """The specification from a message.

        Raises:
            InvalidRequest: If a value is out of its range.
            InvalidWindow: If images do not fit the prompt, or one another.
        """
        sampling = message.sampling
        if len(sampling.bias_tokens) != len(sampling.biases):
            raise InvalidRequest(
                f"logit_bias names {len(sampling.bias_tokens)} tokens and {len(sampling.biases)} biases",
                param="logit_bias",
            )
        positions = TOKENS_ONLY
        if message.images:
            positions = RowPositions(tuple(map(chunk_from_wire, message.images)))
            if positions.chunks[-1].stop > message.num_prompt_tokens:
                raise InvalidWindow(
                    f"an image ends at row {positions.chunks[-1].stop} of a prompt of "
                    f"{message.num_prompt_tokens}"
                )
        cached = tuple(message.cached_tokens)
        if message.images or has_rows(cached):
            positions.check_prefix(cached)
        return cls(
            message.session,
            message.slot,
            SamplingParams(
                **{name: getattr(sampling, name) for name in _SCALARS},
                logit_bias=tuple(zip(sampling.bias_tokens, sampling.biases, strict=True)),
            ),
            message.num_prompt_tokens,
            message.num_top_logprobs if message.HasField("num_top_logprobs") else None,
            cached,
            message.source_slot,
            Resumed(message.resumed_session, message.num_resumed),
            message.grammar or None,
            message.fetch,
            message.client,
            positions,
        )


def chunk_from_wire(message: wire.ImageChunk) -> ImageChunk:
    """The chunk of a message."""
    return ImageChunk(*(getattr(message, name) for name in _OF_CHUNK))


def chunk_to_wire(chunk: ImageChunk) -> wire.ImageChunk:
    """The message of a chunk."""
    return wire.ImageChunk(**{name: getattr(chunk, name) for name in _OF_CHUNK})
