"""Ask a mesh for answers of many schemas, with speculation and without, and look at each."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from jsonschema import Draft202012Validator, FormatChecker

from mesh.bench.schemas.schemas import SCHEMA_CASES, SUBJECTS, SchemaCase
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TIMEOUT_S: Final = 300.0
_MAX_TOKENS: Final = 400
# Greedy, drawn, and drawn through filters, in turn.
_SAMPLINGS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 40},
)


@dataclass(frozen=True)
class SchemaAnswer:
    """One answer.

    Attributes:
        text: What was said.
        finish: Why it ended.
        num_tokens: Its length.
        num_accepted: Proposed tokens that were the model's own.
        num_rejected: And those that were not.
    """

    text: str
    finish: str
    num_tokens: int
    num_accepted: int
    num_rejected: int


@dataclass(frozen=True)
class SchemaResult:
    """One question.

    Attributes:
        case: Its schema.
        number: Of the question among all.
        answer: With speculation.
        plain: Without; None if it was not asked.
        fault: Why the answer is not valid; None if it is.
    """

    case: SchemaCase
    number: int
    answer: SchemaAnswer
    plain: SchemaAnswer | None
    fault: str | None

    @property
    def is_same(self) -> bool:
        """Whether speculation made no difference."""
        return self.plain is None or self.plain.text == self.answer.text


def questions(count: int) -> list[tuple[SchemaCase, str]]:
    """So many questions, all schemas in turn."""
    pairs = product(SUBJECTS, SCHEMA_CASES)
    return [(case, case.question.format(subject)) for subject, case in pairs][:count]


def ask_all(
    port: int,
    count: int,
    *,
    api_key: str,
    num_at_once: int,
    compares: bool,
    on_result: Callable[[SchemaResult], None] = lambda _result: None,
) -> list[SchemaResult]:
    """Ask `count` questions, at most one for each schema and subject.

    Args:
        port: Of the API on 127.0.0.1.
        count: How many.
        api_key: Opens it.
        num_at_once: How many are under way together.
        compares: Whether each is asked without speculation, too.
        on_result: Told of each, in any order.

    Raises:
        MeshError: If the server refuses one.
    """

    def one(numbered: tuple[int, tuple[SchemaCase, str]]) -> SchemaResult:
        number, (case, question) = numbered
        body = request_body(case, question, number)
        answer = _ask(port, body, api_key)
        plain = _ask(port, {**body, "speculation": {"mode": "off"}}, api_key) if compares else None
        result = SchemaResult(case, number, answer, plain, fault_of(case, answer))
        on_result(result)
        return result

    with ThreadPoolExecutor(num_at_once) as pool:
        return list(pool.map(one, enumerate(questions(count))))


def request_body(case: SchemaCase, question: str, number: int) -> dict[str, Any]:
    """What is asked: the question, its schema, and a seed and a way to draw of its own."""
    return {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": case.schema}},
        "max_tokens": _MAX_TOKENS,
        "seed": number,
        **_SAMPLINGS[number % len(_SAMPLINGS)],
    }


def fault_of(case: SchemaCase, answer: SchemaAnswer) -> str | None:
    """Why an answer is not valid; None if it is."""
    if answer.finish != "stop":
        return f"it ended with `{answer.finish}` after {answer.num_tokens} tokens"
    try:
        value = json.loads(answer.text)
    except ValueError as error:
        return f"it is not JSON: {error}"
    validator = Draft202012Validator(case.schema, format_checker=FormatChecker())
    first = next(validator.iter_errors(value), None)
    return None if first is None else f"{first.json_path}: {first.message}"


def _ask(port: int, body: dict[str, Any], api_key: str) -> SchemaAnswer:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    connection = HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        data = response.read()
    except (OSError, HTTPException) as error:
        raise MeshError(f"the connection to the server broke: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise MeshError(f"the server answered {response.status}: {data.decode(errors='replace')}")
    found = json.loads(data)
    [choice] = found["choices"]
    num_accepted = found["timings"]["draft_n_accepted"]
    return SchemaAnswer(
        choice["message"]["content"],
        choice["finish_reason"],
        found["usage"]["completion_tokens"],
        num_accepted,
        found["timings"]["draft_n"] - num_accepted,
    )


def summary(results: Sequence[SchemaResult]) -> dict[str, Any]:
    """For a JSON file."""
    return {
        "questions": len(results),
        "schemas": len({result.case.name for result in results}),
        "valid": sum(result.fault is None for result in results),
        "same_without_speculation": sum(result.is_same for result in results),
        "compared": sum(result.plain is not None for result in results),
        "tokens": sum(result.answer.num_tokens for result in results),
        "accepted": sum(result.answer.num_accepted for result in results),
        "rejected": sum(result.answer.num_rejected for result in results),
        "faults": [
            {
                "schema": result.case.name,
                "number": result.number,
                "fault": result.fault,
                "text": result.answer.text,
            }
            for result in results
            if result.fault is not None
        ],
        "different": [
            {
                "schema": result.case.name,
                "number": result.number,
                "text": result.answer.text,
                "plain": result.plain.text,
            }
            for result in results
            if result.plain is not None and not result.is_same
        ],
    }
