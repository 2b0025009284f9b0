"""Ask a mesh with the official OpenAI client: `python examples/openai_client.py [URL] [QUESTION]`.

Needs `pip install openai`. The API key is read from MESH_API_KEY; a mesh without keys takes any.
"""

import os
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
question = sys.argv[2] if len(sys.argv) > 2 else "Name three rivers in Europe."

client = OpenAI(base_url=url, api_key=os.environ.get("MESH_API_KEY", "none"))

print("models:", ", ".join(model.id for model in client.models.list()))

answer = client.chat.completions.create(
    model="default",
    messages=[{"role": "user", "content": question}],
    max_completion_tokens=128,
    temperature=0.7,
    seed=7,  # the same seed gives the same draw
)
print("answer:", answer.choices[0].message.content)
print("finish reason:", answer.choices[0].finish_reason)
