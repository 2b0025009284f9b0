#!/bin/sh
# Ask about a picture with curl: sh examples/pictures/ask.sh PICTURE.png [QUESTION] [URL]
# The question may have no quotes or backslashes. The API key is read from MESH_API_KEY.
set -eu
picture=$1
question=${2:-What is it?}
url=${3:-http://127.0.0.1:8000/v1}

# The body comes from a pipe: a picture is longer than an argument may be.
{
  printf '{"model": "default", "temperature": 0, "max_tokens": 64, "messages": [{"role": "user", "content": ['
  printf '{"type": "image_url", "image_url": {"url": "data:image/png;base64,'
  base64 < "$picture" | tr -d '\n'
  printf '"}}, {"type": "text", "text": "%s"}]}]}' "$question"
} | curl --silent --show-error --fail-with-body "$url/chat/completions" \
  -H "Authorization: Bearer ${MESH_API_KEY:-none}" -H 'Content-Type: application/json' --data-binary @-
