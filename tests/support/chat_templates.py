"""Chat templates that refuse what well-known ones refuse, in few words, and those of llama.cpp's source."""

from datetime import UTC, datetime
from pathlib import Path

from mesh.text.chat_template import CHATML, ChatTemplate
from meshbench.lab.llama_cpp_build import unpacked_source

# As Qwen3.5: instructions at the beginning only, and somebody must have asked something.
STRICT_SYSTEM = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('no user query') }}{% endif %}"
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system message must be at the beginning') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Gemma 2: two roles in turn, no instructions, no functions.
TWO_ROLES = (
    "{% for m in messages %}{% if m.role != ('user' if loop.index is odd else 'assistant') %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
# As Gemma 3.
TWO_ROLES_AND_SYSTEM = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if system else messages) %}"
    "{% if m.role != ('user' if loop.index is odd else 'assistant') %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ m.role }}\n{% if loop.first and system %}{{ system }}\n\n{% endif %}"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
# As Mistral's: two roles in turn but for calls and results, whose ids have nine characters; no empty answers.
TWO_ROLES_WITH_CALLS = (
    "{% set talk = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% set turn = namespace(number=0) %}"
    "{% for m in talk %}{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (turn.number % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set turn.number = turn.number + 1 %}{% endif %}{% endfor %}"
    "{% if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]{% endif %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in talk %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids must have length 9') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}{{ m.content }}{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids must have length 9') }}{% endif %}"
    "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}</s>"
    "{% elif m.content %}{{ m.content }}</s>"
    "{% else %}{{ raise_exception('an assistant must say something') }}{% endif %}{% endfor %}"
)
# As Llama 3.1 to 3.3.
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('only single tool-calls at once') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{{ m.content }}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "{% if loop.first and tools %}\n{{ tools | tojson }}{% endif %}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# As gpt-oss: later instructions, and calls but the first of a message, are left out without a word.
SILENT = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# tools #}"
)
# As DeepSeek V3: instructions are moved to the beginning, wherever they are.
MOVING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}{# tools #}"
)
OWN = {
    "STRICT_SYSTEM": STRICT_SYSTEM,
    "TWO_ROLES": TWO_ROLES,
    "TWO_ROLES_AND_SYSTEM": TWO_ROLES_AND_SYSTEM,
    "TWO_ROLES_WITH_CALLS": TWO_ROLES_WITH_CALLS,
    "ONE_CALL": ONE_CALL,
    "SILENT": SILENT,
    "MOVING": MOVING,
    "CHATML": CHATML,
}


def template_of(source: str) -> ChatTemplate:
    """A template that is rendered on a certain day."""
    return ChatTemplate(source, bos="<s>", eos="</s>", now=lambda: datetime(2026, 11, 21, tzinfo=UTC))


def collected_templates() -> dict[str, Path]:
    """Files of templates in llama.cpp's source, by name; none if there is no source.

    `SPANMESH_LLAMA_CPP` names a folder with it, as `make test` does; see `unpacked_source`.
    """
    folder = unpacked_source()
    return {} if folder is None else {path.stem: path for path in folder.glob("models/templates/*.jinja")}
