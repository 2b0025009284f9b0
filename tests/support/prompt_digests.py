"""Digests of the token ids of random conversations, and the table of them: chat templates x vocabularies.

The table is that of commit fd7920aa, where clients' texts were tokenized together with the template's own. It
was made there, with this file, `random_conversations.py` and

    python -m tests.support.prompt_digests

which takes llama.cpp's templates and vocabularies from `SPANMESH_LLAMA_CPP`. At later commits, too, it marks
nothing and gives all of a prompt to llama.cpp: for another llama.cpp, whose templates or vocabularies are
others, the same command makes a new table.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import cache
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

from mesh.serve.options import demo_model
from mesh.text.chat_template import ChatTemplate
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import MeshError
from tests.support.chat_templates import collected_templates
from tests.support.random_conversations import RandomConversation, random_conversation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    # Token ids of a conversation.
    IdsOf = Callable[[RandomConversation], Sequence[int]]

TABLE: Final = Path(__file__).parents[1] / "data" / "prompt_digests.json"
NOW: Final = datetime(2026, 11, 21, tzinfo=UTC)
_NUM_CONVERSATIONS: Final = 4
_NUM_BYTES: Final = 8


def conversations(template: str, vocabulary: str) -> list[RandomConversation]:
    """Those of a template and a vocabulary, by their names: no two pairs have the same."""
    random = Random(f"{template} {vocabulary}")
    return [random_conversation(random) for _ in range(_NUM_CONVERSATIONS)]


def digest_of(template: str, vocabulary: str, ids_of: IdsOf) -> str:
    """Digest of the ids of all conversations of a pair; names of errors, if none has ids."""
    outcomes: list[bytes] = []
    errors: list[str] = []
    for conversation in conversations(template, vocabulary):
        try:
            ids = ids_of(conversation)
            outcomes.append(b"".join(token.to_bytes(4, "little") for token in ids))
        except MeshError as error:
            errors.append(type(error).__name__)
            outcomes.append(errors[-1].encode())
    if len(errors) == len(outcomes):
        return ", ".join(sorted(set(errors)))
    return _digest(b"".join(len(outcome).to_bytes(4, "little") + outcome for outcome in outcomes))


def collected_vocabularies() -> dict[str, Path]:
    """Vocabularies in llama.cpp's source and the demo's, by name; none if there is no source."""
    folders = {path.parents[1] for path in collected_templates().values()}
    paths = [path for folder in folders for path in folder.glob("ggml-vocab-*.gguf")]
    return {
        path.stem.removeprefix("ggml-vocab-"): path
        for path in sorted([*paths, demo_model()] if paths else [])
    }


@cache
def file_digest(path: Path) -> str:
    """Digest of a file."""
    return _digest(path.read_bytes())


def read_table() -> dict[str, Any]:
    """The table: digests of `templates` and `vocabularies` by their names, and of `prompts` by both."""
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def make_table() -> dict[str, Any]:
    """A table of the code as it is; see the module."""
    templates, vocabularies = collected_templates(), collected_vocabularies()
    prompts: dict[str, dict[str, str]] = {name: {} for name in sorted(templates)}
    for vocabulary, path in vocabularies.items():
        tokenizer = Tokenizer(path)
        for template, row in prompts.items():
            row[vocabulary] = digest_of(template, vocabulary, unmarked_ids(templates[template], tokenizer))
    return {
        "templates": {name: file_digest(templates[name]) for name in prompts},
        "vocabularies": {name: file_digest(path) for name, path in vocabularies.items()},
        "prompts": prompts,
    }


def unmarked_ids(template: Path, tokenizer: Tokenizer) -> IdsOf:
    """Ids of prompts in which nothing tells clients' texts apart, as llama.cpp alone makes them."""
    source = template.read_text(encoding="utf-8")
    renderer = ChatTemplate(source, bos=tokenizer.bos, eos=tokenizer.eos, now=lambda: NOW)

    def ids_of(given: RandomConversation) -> Sequence[int]:
        text = renderer.render(given.messages, given.variables, tools=given.tools, ending=given.ending)
        if tokenizer.adds_bos:
            text = text.removeprefix(tokenizer.bos)
        return tokenizer.encode(text, add_special=True, parse_special=True)

    return ids_of


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=_NUM_BYTES).hexdigest()


if __name__ == "__main__":
    TABLE.write_text(json.dumps(make_table(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
