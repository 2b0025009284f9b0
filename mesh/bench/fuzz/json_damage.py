"""Ways to make a JSON value, or its text, wrong. Pure: the generator that is handed in decides."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

from mesh.bench.fuzz.schema_values import TEXTS

if TYPE_CHECKING:
    from random import Random

_WRONG: Final[tuple[Any, ...]] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 1e308, -0.0, 1.5, 5e-324, "", "1",
    [], {}, [[]], [None], [{}], {"": {}}, ["a", 1], float("nan"), float("inf"), 10**400, list(range(300)),
    "x" * 20_000, ["x"] * 2000, [[0] * 50] * 50, {str(number): number for number in range(500)},
)  # fmt: skip
_NAMES: Final = (
    "",
    "__proto__",
    "model_config",
    "self",
    "role",
    "messages",
    "stream",
    "n",
    "user",
    "\x00",
    "\ud800",
)


def damaged_value(value: Any, random: Random) -> Any:
    """A copy of a JSON value with one to three of its parts replaced, removed or added.

    Args:
        value: Containers of it are copied.
        random: Decides.
    """
    value = json.loads(json.dumps(value))
    for _ in range(random.choice((1, 1, 2, 3))):
        value = _damage(value, random)
    return value


def json_text(value: Any, random: Random) -> bytes:
    """A JSON value as a client might write it: spaced, escaped, with a mark before it, or in another coding.

    Args:
        value: Any.
        random: Decides.
    """
    is_ascii = random.random() < 0.5
    indent = random.choice((None, None, None, 0, 2))
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    if random.random() < 0.1:
        depth = random.choice((2, 50, 900, 5000))
        text = text.replace('"messages"', f'"deep": {"[" * depth}{"]" * depth}, "messages"', 1)
    if random.random() < 0.03:
        return text.encode(random.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7")), "surrogatepass")
    return text.encode("utf-8", "surrogatepass")


def _damage(value: Any, random: Random) -> Any:
    # The deeper a part lies, the less likely it is the one.
    if isinstance(value, dict) and value and random.random() < 0.7:
        name = random.choice(list(value))
        match random.randrange(5):
            case 0:
                del value[name]
            case 1:
                value[random.choice((*_NAMES, *TEXTS))] = _wrong(random)
            case _:
                value[name] = _damage(value[name], random)
        return value
    if isinstance(value, list) and value and random.random() < 0.7:
        at = random.randrange(len(value))
        match random.randrange(5):
            case 0:
                del value[at]
            case 1:
                value[at:at] = [value[at]] * random.choice((1, 70, 600))
            case _:
                value[at] = _damage(value[at], random)
        return value
    return _wrong(random)


def _wrong(random: Random) -> Any:
    # A copy: further damage may befall it.
    return deepcopy(random.choice((*_WRONG, *TEXTS)))
