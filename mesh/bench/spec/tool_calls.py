"""`tool-call`: answer with JSON that names a function and its arguments, as agents do."""

from __future__ import annotations

import json
from typing import Any, Final

from mesh.bench.spec.workload import Workload, chat_question


def _tool(name: str, about: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return {
        "name": name,
        "description": about,
        "parameters": {"type": "object", "properties": properties, "required": list(parameters)},
    }


_TOOLS: Final = (
    _tool("get_weather", "The weather of a day.", city="string", date="string", unit="string"),
    _tool("book_train", "Book seats.", origin="string", destination="string", date="string", seats="integer"),
    _tool("send_mail", "Send a message.", to="string", subject="string", body="string"),
)

_WISHES: Final = (
    ("weather", "What is the weather in Lisbon, Porto and Faro on 2026-05-02, in celsius?"),
    ("trains", "Book two seats from Berlin to Munich on 2026-03-14 and two seats back on 2026-03-16."),
    ("mails", "Tell anna@example.com and ben@example.com that the meeting moved to ten o'clock."),
    ("journey", "Book one seat from Rome to Naples on 2026-07-01 and mail the date to carla@example.com."),
)


def tool_call() -> Workload:
    """The same three tools and several wishes."""
    tools = json.dumps(_TOOLS, indent=1)
    return Workload(
        "tool-call",
        tuple(
            chat_question(
                label,
                f"These are your tools, as JSON schemas:\n{tools}\n\n"
                "Answer with a JSON array of calls, each an object with `name` and `arguments`, and with "
                f"nothing else.\n\n{wish}",
            )
            for label, wish in _WISHES
        ),
    )
