"""A load of clients with API keys of whom some hang up: what is asked, and until when. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

from mesh.bench.serve.made_up import made_up_prompts
from mesh.bench.stress.moment import Moment, draw_moment
from mesh.bench.stress.script import Script, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

_STREAMED_SHARE: Final = 0.75
# Words of the beginnings, and which of the earlier ones each goes on from: some are beginnings of others.
_BEGINNINGS: Final[tuple[tuple[int, int | None], ...]] = (
    (8, None),
    (24, 0),
    (60, 1),
    (50, None),
    (110, 2),
    (90, 3),
)
_END_WORDS: Final = (1, 3, 12, 40)
_ANSWER_TOKENS: Final = (4, 8, 16, 24)
# Of requests that begin like no other.
_ALONE_SHARE: Final = 0.1


@dataclass(frozen=True)
class Visit:
    """One request of one client.

    Attributes:
        request: Which, from 0.
        is_streamed: Whether the answer is to come token by token.
        moment: When the client hangs up; None waits for the end.
    """

    request: int
    is_streamed: bool
    moment: Moment | None


@dataclass(frozen=True)
class VisitOrder:
    """A load for one server.

    Attributes:
        port: Of the server, on the asking host's loopback.
        api_keys: At least one; the client of place i under way has key i, modulo their number.
        ids: Of the requests.
        bodies: Of each request: streamed, and in one piece; JSON.
        visits: In this order.
        num_at_once: Clients.
        timeout_s: A request that takes longer has failed.
    """

    port: int
    api_keys: tuple[str, ...]
    ids: tuple[str, ...]
    bodies: tuple[tuple[str, str], ...]
    visits: tuple[Visit, ...]
    num_at_once: int
    timeout_s: float = 300.0

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> VisitOrder:
        """What `dataclasses.asdict` made, after JSON: which knows no tuples."""
        visits = (
            Visit(**{**visit, "moment": None if visit["moment"] is None else Moment(**visit["moment"])})
            for visit in fields["visits"]
        )
        return cls(
            **{
                **fields,
                "api_keys": tuple(fields["api_keys"]),
                "ids": tuple(fields["ids"]),
                "bodies": tuple((streamed, whole) for streamed, whole in fields["bodies"]),
                "visits": tuple(visits),
            }
        )


def scripts_with_shared_beginnings(count: int, seed: int) -> tuple[Script, ...]:
    """Requests of which most begin like others, for a few words or for hundreds; greedy and sampled.

    Args:
        count: How many different ones.
        seed: The same seed, the same requests.
    """
    random = Random(seed)  # noqa: S311 - a load, not a secret
    beginnings: list[str] = []
    for num_words, earlier in _BEGINNINGS:
        words = _words(random, num_words)
        beginnings.append(words if earlier is None else f"{beginnings[earlier]} {words}")
    scripts = []
    for index in range(count):
        end = _words(random, random.choice(_END_WORDS))
        is_alone = random.random() < _ALONE_SHARE
        text = end if is_alone else f"{random.choice(beginnings)} {end}"
        turn = Turn(text, random.choice(_ANSWER_TOKENS))
        temperature = 0.8 if index % 2 else 0.0
        scripts.append(Script(f"request {index}", (turn,), temperature, seed=random.randrange(2**31)))
    return tuple(scripts)


def draw_visits(count: int, scripts: Sequence[Script], hang_up_share: float, seed: int) -> tuple[Visit, ...]:
    """Each request about as often as the others, in a random order.

    Args:
        count: How many visits.
        scripts: The requests, of one turn each.
        hang_up_share: Of visits whose client hangs up, 0 to 1.
        seed: The same seed, the same visits.
    """
    random = Random(seed)  # noqa: S311 - a load, not a secret
    numbers = [number % len(scripts) for number in range(count)]
    random.shuffle(numbers)
    visits = []
    for number in numbers:
        is_streamed = random.random() < _STREAMED_SHARE
        max_tokens = scripts[number].turns[0].max_tokens
        moment = draw_moment(random, hang_up_share, max_tokens, is_streamed=is_streamed)
        visits.append(Visit(number, is_streamed, moment))
    return tuple(visits)


def bodies_of(script: Script) -> tuple[str, str]:
    """A request of one turn, its answer streamed and in one piece, as JSON."""
    streamed = script.body(0, ()).decode()
    fields = json.loads(streamed)
    del fields["stream_options"]
    return streamed, json.dumps({**fields, "stream": False})


def num_slots_for(num_at_once: int, num_keys: int) -> int:
    """Slots for a load: one more than there are clients, so that keys take them from one another.

    And for each key at least twice its clients, and one: until the server has noticed that a client hung up,
    its next request is beside the old one, and no key may have all slots.
    """
    clients_of_key = -(-num_at_once // num_keys)
    return max(num_at_once, 2 * clients_of_key) + 1


def _words(random: Random, count: int) -> str:
    return made_up_prompts(1, count, random.randrange(2**31))[0].text
