"""May one model draft for another? Only if every token id means the same to both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spanmesh_proto.errors import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Vocabulary:
    """What token ids mean to a model.

    Attributes:
        name: Of the model, for error texts.
        texts: The text of each id, as the vocabulary spells it.
        special: Ids with a purpose, such as `eos`, by its name; None if there is none.
        num_used: Ids from here on are padding that no text is ever made of.
    """

    name: str
    texts: Sequence[bytes]
    special: Mapping[str, int | None]
    num_used: int


def num_shared_tokens(draft: Vocabulary, target: Vocabulary) -> int:
    """How many ids, from 0 on, mean the same to both. The rest is padding, of which sizes of a family differ.

    Raises:
        InvalidModel: Naming the first id, or the first special token, that differs.
    """
    num_compared = min(len(draft.texts), len(target.texts))
    for token in range(num_compared):
        if draft.texts[token] != target.texts[token]:
            raise _refusal(draft, target, token)
    if max(draft.num_used, target.num_used) > num_compared:
        raise _refusal(draft, target, num_compared)
    for purpose, meant in target.special.items():
        said = draft.special.get(purpose)
        if said != meant:
            raise InvalidModel(
                f"{draft.name} cannot draft for {target.name}: {purpose} is token {said} in the draft, "
                f"{meant} in the target; make a draft with `mesh draft make`"
            )
    return num_compared


def _refusal(draft: Vocabulary, target: Vocabulary, token: int) -> InvalidModel:
    return InvalidModel(
        f"{draft.name} cannot draft for {target.name}: token {token} is {_spelled(draft, token)} in the "
        f"draft, {_spelled(target, token)} in the target; make a draft with `mesh draft make`"
    )


def _spelled(vocabulary: Vocabulary, token: int) -> str:
    if token >= len(vocabulary.texts):
        return f"missing (it has {len(vocabulary.texts)} tokens)"
    return repr(vocabulary.texts[token].decode("utf-8", "replace"))
