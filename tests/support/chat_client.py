"""Asks a mesh through the `openai` package, some questions at once. A program, to be run on a lab's host."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI


def ask_streaming(client: OpenAI, prompt: str, max_tokens: int, fields: dict[str, Any]) -> dict[str, Any]:
    text, finish, num_tokens = "", None, None
    with client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=fields,
    ) as stream:
        for chunk in stream:
            if chunk.usage is not None:
                num_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
    return {"text": text, "num_tokens": num_tokens, "finish": finish}


def ask_at_once(client: OpenAI, prompt: str, max_tokens: int, fields: dict[str, Any]) -> dict[str, Any]:
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        extra_body=fields,
    )
    choice = answer.choices[0]
    num_tokens = answer.usage.completion_tokens if answer.usage else None
    return {"text": choice.message.content, "num_tokens": num_tokens, "finish": choice.finish_reason}


if __name__ == "__main__":
    job: dict[str, Any] = json.load(sys.stdin)
    with (
        OpenAI(base_url=job["base_url"], api_key="none", max_retries=0, timeout=180) as openai,
        ThreadPoolExecutor(job["concurrency"]) as pool,
    ):
        waiting = [
            # Every fourth without a stream: the same words must come either way.
            pool.submit(
                ask_at_once if number % 4 == 3 else ask_streaming,
                openai,
                prompt,
                job["max_tokens"],
                job.get("fields", {}),
            )
            for number, prompt in enumerate(job["prompts"])
        ]
        json.dump([answer.result() for answer in waiting], sys.stdout)
