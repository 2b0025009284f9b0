"""Token ids of conversations without names of control tokens: those of commit fd7920aa; see `prompt_digests`.

Marking what clients wrote changes no id of theirs: all templates and vocabularies of llama.cpp's source, and
SmolLM2's vocabulary.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import TYPE_CHECKING

import pytest

from mesh.text import text_worker
from mesh.text.answer_format import MARKS
from mesh.text.text_jobs import TextModel, packed_job
from mesh.text.tokenizer import Tokenizer, stamp_of
from mesh.util.worker_pool import unpacked_answer
from tests.support.chat_templates import collected_templates
from tests.support.prompt_digests import (
    NOW,
    TABLE,
    collected_vocabularies,
    conversations,
    digest_of,
    file_digest,
    read_table,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from tests.support.prompt_digests import IdsOf
    from tests.support.random_conversations import RandomConversation

TEMPLATES = collected_templates()
VOCABULARIES = collected_vocabularies()
# One of each type that loads in a tenth of a second, and several of byte-pair encoding.
QUICK = ("bert-bge", "falcon", "llama-spm", "mpt", "starcoder", "SmolLM2-135M-Instruct.Q4_1")
MOST_TOKENS = 2**20

loaded = cache(Tokenizer)

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not VOCABULARIES, reason="no source of llama.cpp: see SPANMESH_LLAMA_CPP"),
]


@pytest.fixture(autouse=True, scope="module")
def loaded_once() -> Iterator[None]:
    """Each vocabulary is loaded once for all templates, where the worker loads it for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_worker, "Tokenizer", loaded)
        yield


def worker_ids(template: Path, vocabulary: Path) -> IdsOf:
    """Ids as the processes for text make them."""
    model = TextModel(str(vocabulary), stamp_of(vocabulary), template.read_text(encoding="utf-8"))

    def ids_of(given: RandomConversation) -> memoryview:
        values = {
            "messages": given.messages,
            "variables": given.variables,
            "reasoning": {},
            "tools": given.tools,
            "ending": given.ending.name,
            "now": NOW.isoformat(),
            "most_tokens": MOST_TOKENS,
            "param": "messages",
        }
        _, data = unpacked_answer(text_worker.handle(*packed_job("prompt", model, values)))
        return data.cast("i")

    return ids_of


def check(pairs: Iterable[tuple[str, str]]) -> None:
    """Compare pairs of a template and a vocabulary with the table."""
    recorded = read_table()["prompts"]
    other = []
    for template, vocabulary in pairs:
        texts = repr([vars(each) for each in conversations(template, vocabulary)])
        assert not [name for name in control_names(vocabulary) if name in texts]
        ids_of = worker_ids(TEMPLATES[template], VOCABULARIES[vocabulary])
        if digest_of(template, vocabulary, ids_of) != recorded[template][vocabulary]:
            other.append(f"{template} with {vocabulary}")
    assert not other, "other ids than at fd7920aa: compare those of `worker_ids` with those of `unmarked_ids`"


@cache
def control_names(vocabulary: str) -> frozenset[str]:
    """Names of control tokens, and of all marks of calls and of reasoning."""
    special = loaded(VOCABULARIES[vocabulary]).special_tokens
    return MARKS.union(each.name for each in special if not each.is_user_defined)


@pytest.mark.parametrize(("kind", "paths"), [("templates", TEMPLATES), ("vocabularies", VOCABULARIES)])
def test_the_table_is_that_of_this_source(kind: str, paths: dict[str, Path]) -> None:
    found = {name: file_digest(path) for name, path in paths.items()}
    recorded = read_table()[kind]
    changed = {name for name in found.keys() | recorded.keys() if found.get(name) != recorded.get(name)}
    assert not changed, (
        f"{kind} that are new, gone or changed since {TABLE.name} was made: make it anew with"
        " `python -m tests.support.prompt_digests`, and see that only digests of theirs change"
    )


def test_a_template_gives_the_ids_of_fd7920aa() -> None:
    """All templates, each with one of the vocabularies that are loaded quickly."""
    random = Random(49)
    check((template, random.choice(QUICK)) for template in sorted(TEMPLATES))


@pytest.mark.sweep
@pytest.mark.parametrize("vocabulary", sorted(VOCABULARIES))
def test_all_templates_give_the_ids_of_fd7920aa(vocabulary: str) -> None:
    check((template, vocabulary) for template in sorted(TEMPLATES))
