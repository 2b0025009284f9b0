"""Token ids beside text: what `return_token_ids` asks for, where vLLM puts it.

`choices[].token_ids` holds every token that the model said, as many as `usage.completion_tokens` counts:
those without text, the end token and those of a stop string too, as in vLLM. Whoever goes on from an answer,
replays it or trains on it needs what was said, and the text does not tell: other tokens may spell the same
text, and control tokens have none. In a stream the ids come with the step that committed them, whether or not
their text is held back; one chunk's after the other's they are those of the whole answer.

`prompt_token_ids` are the answer's in a chat and each choice's in a completion, which may have several
prompts; a stream has them in its first chunk, or in the first of each choice.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

ANSWER_FIELD: Final = "token_ids"
PROMPT_FIELD: Final = "prompt_token_ids"


def ids_member(name: str, ids: Sequence[int] | None) -> str:
    """A further member of a JSON object that has some: `,"token_ids":[1,2]`; nothing if there is none to add.

    Args:
        name: Of the field.
        ids: Its value, or None if it was not asked for.
    """
    return "" if ids is None else f',"{name}":{json.dumps(ids, separators=(",", ":"))}'
