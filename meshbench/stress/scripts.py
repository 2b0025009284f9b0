"""Scripts of the load: chats of mixed length, and clients with API keys."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, Final

from meshbench.datasets import made_up_prompts
from meshbench.load_client.hang_ups import draw_hang_up_time
from meshbench.load_client.schedule import Request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# A template's own tokens around each message, and words that turn out to be two tokens.
TOKENS_AROUND: Final = 32
WORD_TOKENS: Final = 1.25
_FULL_SHARE: Final = 0.7
_STREAMED_SHARE: Final = 0.75
# Words of the beginnings, and which of the earlier ones each goes on from: some are beginnings of others.
_PREFIXES: Final[tuple[tuple[int, int | None], ...]] = (
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
class Turn:
    """One request of a chat."""

    text: str
    """The user's message."""
    max_tokens: int
    """Of the answer."""
    is_full: bool = True
    """Whether the answer continues to the last token."""
    is_cold: bool = False
    """Whether the server is asked to compute the whole prompt, also what it still holds of it."""


@dataclass(frozen=True)
class Script:
    """A chat whose messages do not depend on the answers."""

    id: str
    """Distinguishes it from others."""
    turns: tuple[Turn, ...]
    """At least one."""
    temperature: float = 0.0
    """Of sampling, 0 for greedy."""
    seed: int = 0
    """Of sampling."""

    def request(self, turn: int, answers: Sequence[str], fields: Mapping[str, Any] = {}) -> Request:
        """A streamed request with usage and token ids.

        Args:
            turn: Which, from 0.
            answers: Answers to earlier turns.
            fields: Further ones of the body.
        """
        messages: list[dict[str, str]] = []
        for earlier, answer in zip(self.turns[:turn], answers, strict=True):
            messages.append({"role": "user", "content": earlier.text})
            messages.append({"role": "assistant", "content": answer})
        now = self.turns[turn]
        messages.append({"role": "user", "content": now.text})
        own = {
            "messages": messages,
            "max_tokens": now.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": now.is_full,
            "cache_prompt": not now.is_cold,
            "return_token_ids": True,
        }
        return Request.streamed({**own, **fields}, name=prompt_id(self.id, turn))


@dataclass(frozen=True)
class Mix:
    """Lengths of texts; each is as likely as the others."""

    prompt_tokens: tuple[int, ...]
    """Of a message, about."""
    answer_tokens: tuple[int, ...]
    """The most of an answer."""


WIDE: Final = Mix((8, 24, 64, 64, 160, 160, 400, 900), (8, 24, 48, 64))
QUICK: Final = Mix((6, 16, 40, 90), (6, 12, 20))


def prompt_id(script: str, turn: int) -> str:
    """Id of a request."""
    return f"{script}, turn {turn + 1}"


def mixed_scripts(
    count: int, mix: Mix, *, ctx_size: int, seed: int, is_even: bool = False
) -> tuple[Script, ...]:
    """Chats of one to three turns; greedy and sampled; some to their last token, some to their own end.

    A first turn is computed from its first token on, later ones may begin with what the stages still hold:
    as with users who come with something new and then go on with it.

    Args:
        count: How many.
        mix: Lengths.
        ctx_size: Positions of a session; no chat goes beyond.
        seed: The same seed, the same chats.
        is_even: Whether all answers go on to their last token, and all prompts are computed from their first:
            then any server has the same work.
    """
    random = Random(seed)  # noqa: S311 - a load, not a secret
    scripts = []
    for index in range(count):
        # One in three is a chat of several turns, one in six of three.
        wanted = 1 + (index % 3 == 1) + (index % 6 == 4)
        turns: list[Turn] = []
        room = float(ctx_size)
        for number in range(wanted):
            num_tokens = random.choice(mix.prompt_tokens)
            max_tokens = random.choice(mix.answer_tokens)
            room -= num_tokens * WORD_TOKENS + max_tokens + TOKENS_AROUND
            if turns and room < 0:
                break
            (prompt,) = made_up_prompts(1, num_tokens, random.randrange(2**31))
            is_full = random.random() < _FULL_SHARE or is_even
            turns.append(Turn(prompt.text, max_tokens, is_full=is_full, is_cold=number == 0 or is_even))
        temperature = 0.8 if index % 4 == 3 else 0.0
        scripts.append(Script(f"chat {index}", tuple(turns), temperature, seed=random.randrange(2**31)))
    return tuple(scripts)


def scripts_with_shared_prefixes(count: int, seed: int) -> tuple[Script, ...]:
    """Requests of which most begin like others, for a few words or for hundreds; greedy and sampled.

    Args:
        count: How many different ones.
        seed: The same seed, the same requests.
    """
    random = Random(seed)  # noqa: S311 - a load, not a secret
    prefixes: list[str] = []
    for num_words, earlier in _PREFIXES:
        words = _words(random, num_words)
        prefixes.append(words if earlier is None else f"{prefixes[earlier]} {words}")
    scripts = []
    for index in range(count):
        end = _words(random, random.choice(_END_WORDS))
        is_alone = random.random() < _ALONE_SHARE
        text = end if is_alone else f"{random.choice(prefixes)} {end}"
        turn = Turn(text, random.choice(_ANSWER_TOKENS))
        temperature = 0.8 if index % 2 else 0.0
        scripts.append(Script(f"request {index}", (turn,), temperature, seed=random.randrange(2**31)))
    return tuple(scripts)


def draw_client_requests(
    count: int,
    scripts: Sequence[Script],
    hang_up_share: float,
    seed: int,
    fields: Mapping[str, Any] = {},
) -> tuple[Request, ...]:
    """Each script about as often as the others, in a random order; most answers streamed, the others whole.

    Args:
        count: How many requests.
        scripts: Of one turn each.
        hang_up_share: Share of requests whose client hangs up, 0 to 1.
        seed: The same seed, the same requests.
        fields: Further ones of each request.
    """
    random = Random(seed)  # noqa: S311 - a load, not a secret
    numbers = [number % len(scripts) for number in range(count)]
    random.shuffle(numbers)
    streamed = [script.request(0, (), fields) for script in scripts]
    requests = []
    for number in numbers:
        request = streamed[number]
        is_streamed = random.random() < _STREAMED_SHARE
        max_tokens = scripts[number].turns[0].max_tokens
        hang_up_time = draw_hang_up_time(random, hang_up_share, max_tokens, is_streamed=is_streamed)
        body = request.body if is_streamed else _whole(request.body)
        requests.append(replace(request, body=body, is_streamed=is_streamed, hang_up_time=hang_up_time))
    return tuple(requests)


def _whole(streamed: str) -> str:
    """A request for a stream as one for an answer in one piece."""
    fields = json.loads(streamed)
    del fields["stream_options"]
    return json.dumps({**fields, "stream": False})


def num_slots_for(num_at_once: int, num_keys: int) -> int:
    """Slots for a load: one more than there are clients, so that keys take them from one another.

    And for each key at least twice its clients, and one: until the server has noticed that a client hung up,
    its next request is beside the old one, and no key may have all slots.
    """
    clients_of_key = -(-num_at_once // num_keys)
    return max(num_at_once, 2 * clients_of_key) + 1


def _words(random: Random, count: int) -> str:
    return made_up_prompts(1, count, random.randrange(2**31))[0].text
