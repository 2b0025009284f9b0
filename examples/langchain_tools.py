"""A mesh as a LangChain model: `python examples/langchain_tools.py [URL] [QUESTION]`.

Needs `pip install langchain-openai`. Anything that takes a chat model of LangChain's takes this one.
"""

import os
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
question = sys.argv[2] if len(sys.argv) > 2 else "What is 6 times 7?"

model = ChatOpenAI(
    base_url=url,
    api_key=SecretStr(os.environ.get("MESH_API_KEY", "none")),
    model="default",
    temperature=0,
    max_completion_tokens=96,
)


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


print("streamed: ", end="")
for part in model.stream(question):
    print(part.text, end="", flush=True)
print()

# `tool_choice` makes sure that it is called; leave it out to let the model decide.
asked = HumanMessage(question)
called = model.bind_tools([multiply], tool_choice="multiply").invoke([asked])
print("calls:", called.tool_calls)
results = [
    ToolMessage(str(multiply.invoke(call["args"])), tool_call_id=call["id"]) for call in called.tool_calls
]
answer = model.invoke([asked, called, *results])
print("answer:", answer.text)
print("usage:", answer.usage_metadata)
