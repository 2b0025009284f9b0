"""Stream an answer, then say how fast it came: `python examples/stream_usage.py [URL] [QUESTION]`.

Needs `pip install openai`. The last chunk carries the usage, and how many proposed tokens were accepted.
"""

import os
import sys
import time

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
question = sys.argv[2] if len(sys.argv) > 2 else "Count from one to twenty, in words."

client = OpenAI(base_url=url, api_key=os.environ.get("MESH_API_KEY", "none"))

started_s = time.monotonic()
first_s = None
usage = None
timings = {}
stream = client.chat.completions.create(
    model="default",
    messages=[{"role": "user", "content": question}],
    max_completion_tokens=128,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    usage = chunk.usage or usage
    timings = getattr(chunk, "timings", timings)
    for choice in chunk.choices:
        if choice.delta.content:
            first_s = first_s or time.monotonic()
            print(choice.delta.content, end="", flush=True)
ended_s = time.monotonic()
print()

if usage is not None and first_s is not None:
    rate = (usage.completion_tokens - 1) / max(ended_s - first_s, 1e-9)
    print(f"\nfirst token after {1000 * (first_s - started_s):.0f} ms, then {rate:.1f} tokens/s")
    print(f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} answered")
    if timings:
        print(f"{timings['draft_n_accepted']} of {timings['draft_n']} proposed tokens accepted")
