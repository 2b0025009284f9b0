"""Hostile gRPC messages."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from spanmesh_proto import windows_pb2 as wire
from tests.qualification.fuzz.mutations import damaged

if TYPE_CHECKING:
    from random import Random

_U32: Final = 2**32 - 1
_U64: Final = 2**64 - 1
_ODD_FLOATS: Final = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-310, 1e308, float("inf"), float("-inf"), float("nan"))
_MOST_WINDOWS: Final = 4
_ODD_GRAMMARS: Final = (
    "root ::= .*",
    'root ::= "a"',
    "root ::= [^a]* a",
    'root ::= root "a" | "b"',
    'root ::= a | b | ""\na ::= . root\nb ::= . root "!"',
    "root ::= " + "(" * 1000,
    "root ::= " + ".? " * 10_000,
    '"' * 200_000,
    "\0\n",
)


@dataclass(frozen=True)
class StageShape:
    """What a message must fit."""

    is_first: bool
    """Whether windows come with token ids alone."""
    n_embd: int
    """Values of one row of hidden states."""
    n_vocab: int
    """Token ids are below this."""
    num_slots: int
    """Slots that exist."""
    ctx_size: int
    """Positions of each."""
    max_rows: int
    """Rows of one window."""


@dataclass
class _DraftWindow:
    """A window, and its rows of hidden states, which its bundle carries."""

    window: wire.Window
    hidden: bytes


@dataclass
class HostilePeer:
    """Makes frames and control requests; remembers what it opened, so that some of them are in order."""

    shape: StageShape
    """Of the stage that they are for."""
    random: Random
    """Decides."""
    _ends: dict[int, int] = field(default_factory=dict)

    def frame(self) -> bytes:
        """The next message for the Link, serialised."""
        random = self.random
        match random.randrange(20):
            case 0:
                frame = wire.Frame(vocabulary=self._vocabulary())
            case 1:
                frame = wire.Frame(hello=self._hello())
            case 2 | 3 | 4 | 5:
                frame = wire.Frame(open=self._open())
            case _:
                frame = wire.Frame(windows=self._bundle())
        return self._damaged_perhaps(frame.SerializeToString())

    def control(self) -> bytes:
        """The next message for the Control stream, serialised."""
        random = self.random
        session, epoch = self._session(), random.choice((0, 1, _U32))
        request = random.choice(
            (
                wire.ControlRequest(),
                wire.ControlRequest(hello=self._hello()),
                wire.ControlRequest(cancel=wire.Cancel(session=session, epoch=epoch)),
                wire.ControlRequest(close=wire.Close(session=session)),
                wire.ControlRequest(ping=wire.Ping(sent_us=random.choice((0, 1, _U64)))),
            )
        )
        return self._damaged_perhaps(request.SerializeToString())

    def follow(self, hello: wire.Hello) -> bytes:
        """A request of a copy, serialised.

        Args:
            hello: One that the stage takes; most requests begin with it.
        """
        random, shape = self.random, self.shape
        request = wire.FollowRequest(hello=random.choice((hello, hello, hello, self._hello())))
        for _ in range(random.choice((0, 1, shape.num_slots, shape.num_slots + 1, 2000))):
            request.held.add(
                slot=random.choice((0, shape.num_slots, _U32)),
                num_positions=random.choice((0, 1, 4, shape.ctx_size, _U32)),
                tokens_sha256=random.randbytes(random.choice((0, 31, 32, 1000))),
            )
        return self._damaged_perhaps(request.SerializeToString())

    def _damaged_perhaps(self, data: bytes) -> bytes:
        return damaged(data, self.random) if self.random.random() < 0.2 else data

    def _hello(self) -> wire.Hello:
        random = self.random
        return wire.Hello(
            protocol_version=random.choice((0, 3, _U32)),
            software_version=random.choice(("", "0.1.0", "v" * 100_000)),
            mesh_id=random.choice(("", "another", "m" * 100_000)),
            sender=random.choice(("", "coordinator", "\n\0", "s" * 100_000)),
        )

    def _session(self) -> int:
        known = list(range(1, 7))
        return self.random.choice([0, *known, *known, *known, _U64])

    def _token(self) -> int:
        n_vocab = self.shape.n_vocab
        return self.random.choice((0, 1, self.random.randrange(n_vocab), n_vocab - 1, n_vocab, 2**31, _U32))

    def _open(self) -> wire.Open:
        random, shape = self.random, self.shape
        message = wire.Open(
            session=self._session(),
            slot=random.choice((*range(shape.num_slots), shape.num_slots, _U32)),
            sampling=wire.Sampling(top_p=1.0, repetition_penalty=1.0, seed=random.choice((0, _U64))),
            num_prompt_tokens=random.choice((0, 8, _U32)),
        )
        self._ends[message.session] = 0
        for _ in range(random.choice((0, 0, 1, 2))):
            odd = (
                self._odd_sampling,
                self._odd_biases,
                self._odd_logprobs,
                self._odd_cache,
                self._odd_grammar,
            )
            random.choice(odd)(message)
        return message

    def _vocabulary(self) -> wire.Vocabulary:
        """One that fits, of single bytes, or one with something wrong."""
        random, n_vocab = self.random, self.shape.n_vocab
        count = random.choice((n_vocab, n_vocab, n_vocab, n_vocab - 1, 0))
        texts = bytes(token % 256 for token in range(n_vocab))
        return wire.Vocabulary(
            texts=random.choice(
                (zlib.compress(texts), zlib.compress(texts), zlib.compress(bytes(10**6)), texts)
            ),
            lengths=[random.choice((1, 1, 1, _U32))] * count,
            end_tokens=random.choice(([], [0], [n_vocab], [_U32] * 1000)),
        )

    def _odd_grammar(self, message: wire.Open) -> None:
        message.grammar = self.random.choice(_ODD_GRAMMARS)

    def _odd_sampling(self, message: wire.Open) -> None:
        name = self.random.choice(
            (
                "temperature",
                "top_p",
                "min_p",
                "frequency_penalty",
                "presence_penalty",
                "repetition_penalty",
            )
        )
        setattr(message.sampling, name, self.random.choice(_ODD_FLOATS))
        message.sampling.top_k = self.random.choice((0, 1, 40, _U32))
        message.sampling.repetition_window = self.random.choice((0, 1, _U32))

    def _odd_biases(self, message: wire.Open) -> None:
        count = self.random.choice((1, 3, 2000))
        message.sampling.bias_tokens.extend(self._token() for _ in range(count))
        message.sampling.biases.extend(
            self.random.choice(_ODD_FLOATS) for _ in range(self.random.choice((count, count, 0)))
        )

    def _odd_logprobs(self, message: wire.Open) -> None:
        message.num_top_logprobs = self.random.choice((0, 5, 20, 21, _U32))

    def _odd_cache(self, message: wire.Open) -> None:
        count = self.random.choice((1, 8, self.shape.ctx_size, self.shape.ctx_size + 1, 10_000))
        message.cached_tokens.extend([self._token()] * count)
        message.source_slot = self.random.choice((0, 1, self.shape.num_slots, _U32))
        self._ends[message.session] = count

    def _bundle(self) -> wire.WindowBundle:
        """Windows, and at times something wrong with all of them."""
        random = self.random
        drafts = [self._window() for _ in range(random.choice((0, 1, 1, 1, 1, 2, _MOST_WINDOWS)))]
        bundle = wire.WindowBundle(
            windows=[draft.window for draft in drafts], hidden=b"".join(draft.hidden for draft in drafts)
        )
        if random.random() < 1 / 8:
            unknown: Any = random.choice((0, 1, 2, 3, -1, 2**31 - 1))
            bundle.hidden_type = unknown
        if random.random() < 1 / 8:
            for _ in range(random.choice((1, 1000))):
                bundle.times.add(queue_us=_U32, compute_us=_U32, num_rows=_U32)
        if random.random() < 1 / 8:
            self._add_features(bundle)
        return bundle

    def _add_features(self, bundle: wire.WindowBundle) -> None:
        """Features of its windows, of others, in odd numbers and sizes."""
        random = self.random
        for _ in range(random.choice((1, 3, 1000))):
            window = random.choice(bundle.windows) if bundle.windows else wire.Window()
            bundle.features.add(
                session=random.choice((window.session, self._session())),
                window_id=random.choice((window.id, 0, _U64)),
                start=random.choice((window.start, _U32)),
                num_rows=random.choice((0, 1, _U32)),
                rows=[bytes(random.choice((0, 2 * self.shape.n_embd, 30_000)))] * random.choice((0, 1, 3)),
                stage=random.choice((0, 1, _U32)),
            )

    def _window(self) -> _DraftWindow:
        """In order with what went before, then with up to three things wrong."""
        random = self.random
        session = self._session()
        end = self._ends.get(session, 0)
        rows = random.randint(1, 6)
        start = random.randint(max(0, end - 4), end)
        window = wire.Window(
            session=session,
            id=random.choice((1, _U64)),
            start=start,
            tokens=[random.randrange(self.shape.n_vocab) for _ in range(rows)],
            verify_rows=random.choice((0, 1, rows)),
        )
        draft = _DraftWindow(window, b"" if self.shape.is_first else self._hidden(rows))
        self._ends[session] = start + rows
        for _ in range(random.choice((0, 0, 0, 1, 1, 2, 3))):
            odd = (self._odd_place, self._odd_tokens, self._odd_hidden, self._odd_checkpoints, self._odd_rest)
            random.choice(odd)(draft)
        return draft

    def _hidden(self, rows: int) -> bytes:
        values = np.frombuffer(self.random.randbytes(rows * self.shape.n_embd), np.int8)
        return (values.astype(np.float32) / 64).tobytes()

    def _odd_place(self, draft: _DraftWindow) -> None:
        window = draft.window
        ctx = self.shape.ctx_size
        window.epoch = self.random.choice((0, 1, 2, _U32))
        window.start = self.random.choice((0, 1, ctx - 1, ctx, 2**31, _U32))

    def _odd_checkpoints(self, draft: _DraftWindow) -> None:
        random, window = self.random, draft.window
        places = (0, 1, window.start, self.shape.ctx_size, _U32)
        window.checkpoints.extend(random.choice(places) for _ in range(random.choice((1, 8, 300))))
        window.recomputed_rows = random.choice((0, 1, _U32))
        window.num_committed = random.choice((0, 1, window.start, _U32))

    def _odd_tokens(self, draft: _DraftWindow) -> None:
        window = draft.window
        del window.tokens[:]
        most = self.shape.max_rows
        count = self.random.choice((0, 1, most, most + 1, 5000))
        window.tokens.extend([self._token()] * count)
        if self.random.random() < 0.5 and not self.shape.is_first:
            draft.hidden = bytes(4 * self.shape.n_embd * count)

    def _odd_hidden(self, draft: _DraftWindow) -> None:
        random, rows, n_embd = self.random, len(draft.window.tokens), self.shape.n_embd
        poison: Any = np.full((rows, n_embd), random.choice(_ODD_FLOATS), np.float64)
        with np.errstate(over="ignore"):
            poison = poison.astype(np.float32)
        draft.hidden = random.choice(
            (
                b"",
                b"\0",
                poison.tobytes(),
                poison.tobytes()[:-1],
                bytes(4 * n_embd * (rows + 1)),
                bytes(2 * n_embd * rows),
                random.randbytes(4 * n_embd * rows),
                bytes(300_000),
            )
        )

    def _odd_rest(self, draft: _DraftWindow) -> None:
        random, window = self.random, draft.window
        window.verify_rows = random.choice((0, 1, len(window.tokens), len(window.tokens) + 1, _U32))
        window.id = random.choice((0, _U64))
        if random.random() < 0.5:
            window.scored_next = random.choice((0, self.shape.n_vocab - 1, self.shape.n_vocab, _U32))
