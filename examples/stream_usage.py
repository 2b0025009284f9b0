"""Stream an answer, then say how fast it came: `python examples/stream_usage.py [URL] [QUESTION]`.

Needs `pip install openai`. The last chunk carries the usage, with the proposed tokens that were accepted.
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
    details = usage.completion_tokens_details
    if details is not None:
        accepted = details.accepted_prediction_tokens or 0
        rejected = details.rejected_prediction_tokens or 0
        print(f"{accepted} of {accepted + rejected} proposed tokens accepted")
