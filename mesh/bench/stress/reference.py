"""Every request answered alone, before any load: what its text has to be, or may become."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mesh.bench.stress.judging import Expected
from mesh.bench.stress.order import Order
from mesh.bench.stress.script import prompt_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.bench.stress.asker import Asker
    from mesh.bench.stress.script import Script


@dataclass(frozen=True)
class Reference:
    """Chats and what they came to.

    Attributes:
        scripts: The chats.
        answers: Of each chat, what was answered alone to each turn.
        expected: By what the requests are called.
    """

    scripts: tuple[Script, ...]
    answers: tuple[tuple[str, ...], ...]
    expected: Mapping[str, Expected]

    def order(self, port: int, fields: Mapping[str, Any], num_at_once: int) -> Order:
        """All chats, later turns with the answers that were given alone, for a server on that port."""
        bodies = tuple(
            tuple(script.body(turn, answers[:turn], fields).decode() for turn in range(len(script.turns)))
            for script, answers in zip(self.scripts, self.answers, strict=True)
        )
        return Order(port, tuple(script.id for script in self.scripts), bodies, num_at_once)


def answer_alone(asker: Asker, port: int, scripts: Sequence[Script], fields: Mapping[str, Any]) -> Reference:
    """Ask turn after turn, one request at a time, each prompt computed from its first token on."""
    cold = {**fields, "cache_prompt": False}
    answers: list[list[str]] = [[] for _ in scripts]
    expected: dict[str, Expected] = {}
    for turn in range(max(len(script.turns) for script in scripts)):
        places = [place for place, script in enumerate(scripts) if turn < len(script.turns)]
        order = Order(
            port,
            tuple(scripts[place].id for place in places),
            tuple((scripts[place].body(turn, answers[place], cold).decode(),) for place in places),
            num_requests=len(places),
        )
        outcome = asker.ask(order)
        for place, told in zip(places, outcome.told, strict=True):
            answers[place].append(told.text)
            script = scripts[place]
            name = prompt_id(script.id, turn)
            alone = replace(told, record=replace(told.record, prompt_id=name))
            expected[name] = Expected(script.turns[turn], alone)
    return Reference(tuple(scripts), tuple(map(tuple, answers)), expected)
