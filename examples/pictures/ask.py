"""Ask about a picture with the official OpenAI client: `python ask.py PICTURE [QUESTION] [URL]`.

Needs `pip install openai`, and a mesh that was started with `--mmproj`. The API key is read from
MESH_API_KEY; a mesh without keys takes any.
"""

import base64
import mimetypes
import os
import sys
from pathlib import Path

from openai import OpenAI

picture = Path(sys.argv[1])
question = sys.argv[2] if len(sys.argv) > 2 else "What is it?"
url = sys.argv[3] if len(sys.argv) > 3 else "http://127.0.0.1:8000/v1"

client = OpenAI(base_url=url, api_key=os.environ.get("MESH_API_KEY", "none"))
can_do = [(model.model_extra or {}).get("capabilities", ()) for model in client.models.list()]
if not any("multimodal" in each for each in can_do):
    sys.exit("no model of this mesh reads pictures: start it with --mmproj")

# The picture itself travels: a mesh fetches nothing from an address.
kind = mimetypes.guess_type(picture.name)[0] or "image/png"
data = base64.b64encode(picture.read_bytes()).decode()
answer = client.chat.completions.create(
    model="default",
    messages=[
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}},
                {"type": "text", "text": question},
            ],
        }
    ],
    max_completion_tokens=64,
    temperature=0,
)
print("answer:", answer.choices[0].message.content)
details = None if answer.usage is None else answer.usage.prompt_tokens_details
print("tokens of the picture:", getattr(details, "image_tokens", None))
