"""What is compared of an answer: all but ids, times, and what depends on speed or on the processor."""

import json
import re
from typing import Any

import httpx

# Values that differ from run to run, or from processor to processor in their last bits.
_MASKED = {
    *("id", "created", "created_at", "completed_at", "system_fingerprint", "timings", "cached_tokens"),
    *("cache_read_input_tokens", "input_tokens_details", "accepted_prediction_tokens"),
    *("rejected_prediction_tokens", "logprob", "token_logprobs", "embedding", "previous_response_id"),
    *("expires_at", "root", "modified", "version"),
}
# Objects of /mesh/status whose keys depend on what happened.
KEYED = {"spans", "groups_found"}
_TEXTS = ("content", "reasoning_content", "text", "arguments", "partial_json", "thinking", "delta")
_ID = re.compile(r"\b(chatcmpl|cmpl|resp|msg|call|fc|rs|embd|req|toolu)([-_])[0-9a-zA-Z]{8,}")
_HEADERS = ("content-type", "allow", "retry-after", "www-authenticate", "access-control-allow-origin")


def answer_in_normal_form(response: httpx.Response) -> dict[str, Any]:
    """Status, headers that clients read, and body."""
    headers = {name: response.headers[name] for name in _HEADERS if name in response.headers}
    kind = headers.get("content-type", "").partition(";")[0]
    body: Any = response.text
    if kind == "application/json":
        body = _masked(response.json())
    elif kind == "text/event-stream":
        body = _merged([_masked(event) for event in _events(response.text)])
    return {"status": response.status_code, "headers": headers, "body": body}


def shape_of(value: Any) -> Any:
    """Keys and types of values; of a list, and of an object whose keys are data, those of one value."""
    if isinstance(value, dict):
        return {
            key: [shape_of(inner) for inner in list(each.values())[:1]] if key in KEYED else shape_of(each)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [shape_of(each) for each in value[:1]]
    if isinstance(value, bool) or value is None:
        return str(type(value).__name__)
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def _masked(value: Any, key: str = "") -> Any:
    if key in _MASKED and value is not None:
        return f"<{key}>"
    if key == "top_logprobs" and isinstance(value, list):
        # Of the completion endpoint logprobs by token.
        return [each if each is None or "token" in each else sorted(each) for each in _masked(value)]
    if isinstance(value, dict):
        return {name: _masked(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_masked(each) for each in value]
    return _ID.sub(r"<\1 id>", value) if isinstance(value, str) else value


def _events(text: str) -> list[Any]:
    events = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith(":")]
        data = "\n".join(line.removeprefix("data: ") for line in lines if line.startswith("data: "))
        name = next((line.removeprefix("event: ") for line in lines if line.startswith("event: ")), None)
        if data:
            content = data if data == "[DONE]" else json.loads(data)
            events.append(content if name is None else {"event": name, "data": content})
    return events


def _merged(events: list[Any]) -> list[Any]:
    """One event for each run of those that differ in their texts only: their number depends on speed."""
    merged: list[tuple[Any, dict[str, str]]] = []
    for event in events:
        texts: dict[str, str] = {}
        blank = _without_texts(event, texts, "")
        if merged and merged[-1][0] == blank and texts:
            for place, text in texts.items():
                merged[-1][1][place] += text
        else:
            merged.append((blank, texts))
    return [{**blank, "texts": texts} if texts else blank for blank, texts in merged]


def _without_texts(value: Any, texts: dict[str, str], place: str) -> Any:
    if isinstance(value, dict):
        left = {}
        for key, each in value.items():
            if key in _TEXTS and isinstance(each, str):
                texts[f"{place}{key}"] = each
            elif key != "sequence_number":
                left[key] = _without_texts(each, texts, f"{place}{key}.")
        return left
    if isinstance(value, list):
        return [_without_texts(each, texts, f"{place}{index}.") for index, each in enumerate(value)]
    return value
