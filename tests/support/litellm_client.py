"""What LiteLLM makes of a mesh, as JSON, in a process of its own.

    python -m tests.support.litellm_client URL KEY

On import LiteLLM sets up logging and HTTP clients of the whole process, and would fetch a list of prices.
"""

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

QUESTION: Any = [{"role": "user", "content": "Name three fruits."}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "colour", "parameters": {"enum": [{"of": "apple"}, {"of": "plum"}]}},
}


async def main(url: str, key: str) -> dict[str, Any]:
    """Whole, streamed, asynchronous, with a tool, and refused."""
    asked: Any = {"model": "openai/default", "api_base": f"{url}/v1", "api_key": key, "num_retries": 0}
    asked |= {"messages": QUESTION, "temperature": 0, "max_tokens": 32}
    whole = litellm.completion(**asked)
    stream = litellm.completion(**asked, stream=True, stream_options={"include_usage": True})
    later = await litellm.acompletion(**asked)
    forced = {"type": "function", "function": {"name": "colour"}}
    called = litellm.completion(**asked, tools=[TOOL], tool_choice=forced)
    try:
        litellm.completion(**{**asked, "temperature": 9})
        refusal = ""
    except litellm.BadRequestError as error:
        refusal = str(error)
    try:
        litellm.completion(**{**asked, "messages": [{"role": "user", "content": "x " * 40_000}]})
        overflow = ""
    except litellm.BadRequestError as error:
        overflow = type(error).__name__
    return {
        "overflow": overflow,
        "whole": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices),
        "later": later.choices[0].message.content,
        "arguments": called.choices[0].message.tool_calls[0].function.arguments,
        "tokens": whole.usage.completion_tokens,
        "refusal": refusal,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
