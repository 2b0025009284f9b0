"""`mesh bench schemas` in small: real stages, real model, the real API; and that it would notice."""

import asyncio
import json
from pathlib import Path
from random import Random

import pytest
from jsonschema import Draft202012Validator

from mesh.structured_output.json_schema import schema_grammar
from mesh.text.tokenizer import Tokenizer
from speculative.controller import ControllerOptions
from speculative.lookup_proposers import NgramProposer
from stages.grammar.session_grammar import make_automaton
from stages.runtime.stage_runtime import RuntimeOptions
from tests.qualification.json_schema_conformance import (
    SCHEMA_CASES,
    SchemaAnswer,
    SchemaCase,
    SchemaResult,
    ask_all,
    fault_of,
    questions,
    summary,
)
from tests.support.api_harness import running_api
from tests.support.json_schemas import random_text
from tests.support.ring_harness import running_coordinator, running_stages


def test_there_are_twenty_schemas_and_two_hundred_questions() -> None:
    assert len({case.name for case in SCHEMA_CASES}) == 20
    asked = questions(200)
    assert len({(case.name, question) for case, question in asked}) == 200
    assert {case.name for case, _ in questions(20)} == {case.name for case in SCHEMA_CASES}


@pytest.mark.parametrize("case", SCHEMA_CASES, ids=lambda case: case.name)
def test_each_schema_is_one_and_its_grammar_keeps_to_it(case: SchemaCase) -> None:
    Draft202012Validator.check_schema(case.schema)
    automaton = make_automaton(schema_grammar(case.schema, param="schema"))
    random = Random(case.name)
    texts = [text for text in (random_text(automaton, random) for _ in range(4)) if text is not None]
    assert texts
    for text in texts:
        assert fault_of(case, said(text)) is None, text


def said(text: str, finish: str = "stop") -> SchemaAnswer:
    return SchemaAnswer(text, finish, 5, 1, 1)


def test_what_is_not_valid_is_noticed() -> None:
    case = SchemaCase("x", {"type": "object", "properties": {"day": {"format": "date"}}}, "")
    assert fault_of(case, said('{"day": "2024-02-28"}')) is None
    assert fault_of(case, said('{"day": "2024-02-30"}')) == "$.day: '2024-02-30' is not a 'date'"
    assert "not JSON" in (fault_of(case, said('{"day"')) or "")
    assert "ended with `length`" in (fault_of(case, said("{}", "length")) or "")
    results = [
        SchemaResult(case, 0, said("{}"), said("{}"), None),
        SchemaResult(case, 1, said("{}"), said("[]"), None),
        SchemaResult(case, 2, said("["), None, "bad"),
    ]
    found = summary(results)
    assert (found["questions"], found["valid"], found["same_without_speculation"]) == (3, 2, 2)
    assert [fault["number"] for fault in found["faults"]] == [2]
    assert [each["plain"] for each in found["different"]] == ["[]"]
    json.dumps(found)


@pytest.mark.model
async def test_a_short_run(smollm2_path: Path, stage_cache_dir: Path) -> None:
    tokenizer = Tokenizer(smollm2_path)
    options = RuntimeOptions(num_slots=2, ctx_size=512, exact=True)
    async with (
        running_stages(smollm2_path, (15,), options, stage_cache_dir) as stages,
        running_coordinator(
            stages,
            context_length=512,
            num_slots=2,
            make_proposer=NgramProposer,
            controller=ControllerOptions(fixed_width=4, fixed_depth=3),
            token_texts=tokenizer.texts,
        ) as coordinator,
        running_api(coordinator, tokenizer) as api,
    ):
        port = int(api.url.rsplit(":", 1)[1].split("/")[0])
        results = await asyncio.to_thread(ask_all, port, 3, api_key="none", num_at_once=2, compares=True)
    found = summary(results)
    assert found["valid"] == found["same_without_speculation"] == found["compared"] == 3, found
    assert found["accepted"] + found["rejected"] > 0
