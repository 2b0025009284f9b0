"""Have the model call a function, and stream it all: `python examples/stream_with_tools.py [URL] [QUESTION]`.

Needs `pip install openai`. The first answer must be a call (`tool_choice="required"` holds the model to the
function's schema); its result goes back, and the second answer is text.
"""

import json
import os
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
question = sys.argv[2] if len(sys.argv) > 2 else "What time is it two hours east of Greenwich?"

client = OpenAI(base_url=url, api_key=os.environ.get("MESH_API_KEY", "none"))

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "local_time",
            "description": "The time of day so many hours east of Greenwich.",
            "parameters": {
                "type": "object",
                "properties": {"hours": {"type": "integer", "minimum": -12, "maximum": 14}},
                "required": ["hours"],
                "additionalProperties": False,
            },
        },
    }
]


def local_time(hours: int) -> str:
    """What the tool does."""
    return f"{datetime.now(UTC) + timedelta(hours=hours):%H:%M}"


def ask(messages: list[Any], **choice: Any) -> dict[str, Any]:
    """Stream one answer, print it as it comes, and return it as a message."""
    content, calls = "", {}
    stream = client.chat.completions.create(
        model="default",
        messages=messages,
        tools=TOOLS,
        max_completion_tokens=128,
        temperature=0,
        stream=True,
        **choice,
    )
    for chunk in stream:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        print(delta.content or "", end="", flush=True)
        # A call's first piece has its id and name; its arguments follow as text, piece by piece.
        for piece in delta.tool_calls or ():
            call = calls.setdefault(piece.index, {"id": piece.id, "name": "", "arguments": ""})
            call["name"] += piece.function.name or ""
            call["arguments"] += piece.function.arguments or ""
            print(piece.function.name or piece.function.arguments or "", end="", flush=True)
    print()
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls.values()
        ]
    return message


messages: list[Any] = [{"role": "user", "content": question}]
answer = ask(messages, tool_choice="required", parallel_tool_calls=False)
messages.append(answer)
for call in answer["tool_calls"]:
    result = local_time(**json.loads(call["function"]["arguments"]))
    print("result:", result)
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
ask(messages, tool_choice="none")
