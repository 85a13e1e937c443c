"""Chat templates of four families, written for these tests, with the habits that make histories hard.

- ``qwen3``: drops the reasoning of answers before the last user message, adds an empty ``<think>`` block to later
  ones, joins tool results into one user turn; ``enable_thinking=False`` opens the answer with a closed block.
- ``llama3``: trims content, puts the tools into the first user message, takes one tool call at most and drops
  the text beside it.
- ``mistral``: moves the tool list to the last user message, wants roles to alternate, nine-character call ids, and every
  tool result announced by a call.
- ``hermes``: plain ChatML with tool calls.

Messages reach a template as vLLM hands them over: tool arguments parsed, absent content as None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rose.testing.toy_tokenizer import HFTokenizer

HERMES = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{%- if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}# Tools\n\n<tools>"
    "{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{%- endif %}"
    "{%- set ns = namespace(query=messages | length - 1, found=false) %}"
    "{%- for m in messages[::-1] %}{%- if not ns.found and m.role == 'user' %}"
    "{%- set ns.query = messages | length - 1 - loop.index0 %}{%- set ns.found = true %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- set content = m.content if m.content is string else '' %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- set think = m.reasoning if m.reasoning is string else '' %}"
    "{%- if not think and '</think>' in content %}"
    "{%- set think = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.query and (loop.last or think) %}"
    "{{- '<think>\n' + think.strip('\n') + '\n</think>\n\n' }}{%- endif %}{{- content.lstrip('\n') }}"
    "{%- for c in m.tool_calls or [] %}{%- if not loop.first or content %}{{- '\n' }}{%- endif %}"
    '{{- \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{- c.function.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
LLAMA3 = (
    "{{- '<|bos|>' }}{%- set first = namespace(user=true) %}"
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start|>system<|end|>\n\n' }}{%- if tools %}{{- 'Environment: ipython\n' }}{%- endif %}"
    "{{- system + '<|eot|>' }}"
    "{%- for m in messages %}"
    "{%- if m.tool_calls %}"
    "{%- if m.tool_calls | length > 1 %}{{- raise_exception('one tool call at a time') }}{%- endif %}"
    "{%- set f = m.tool_calls[0].function %}"
    '{{- \'<|start|>assistant<|end|>\n\n{"name": "\' + f.name + \'", "parameters": \' }}'
    "{{- f.arguments | tojson }}{{- '}<|eot|>' }}"
    "{%- elif m.role == 'tool' %}{{- '<|start|>ipython<|end|>\n\n' }}"
    "{{- {'output': m.content} | tojson }}{{- '<|eot|>' }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|end|>\n\n' }}"
    "{%- if m.role == 'user' and first.user %}{%- set first.user = false %}"
    "{%- if tools %}{{- 'Functions:\n\n' }}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}"
    "{%- endif %}{%- endif %}{{- (m.content or '') | trim + '<|eot|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\n\n' }}{%- endif %}"
)
MISTRAL = (
    "{{- '<|bos|>' }}{%- set ns = namespace(turn=0, last=-1, ids=[]) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
    "{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set ns.turn = ns.turn + 1 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}"
    "{%- if tools and loop.index0 == ns.last %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if m.tool_call_id not in ns.ids %}{{- raise_exception('a tool result without its call') }}{%- endif %}"
    "{{- '[TOOL_RESULTS]' + ({'content': m.content, 'call_id': m.tool_call_id} | tojson) + '[/TOOL_RESULTS]' }}"
    "{%- elif m.tool_calls %}{{- '[TOOL_CALLS][' }}{%- for c in m.tool_calls %}"
    "{%- if c.id | length != 9 %}{{- raise_exception('call ids have nine characters') }}{%- endif %}"
    "{%- set ns.ids = ns.ids + [c.id] %}"
    '{{- {"name": c.function.name, "arguments": c.function.arguments, "id": c.id} | tojson }}'
    "{{- ', ' if not loop.last else '' }}{%- endfor %}{{- ']<|eot|>' }}"
    "{%- else %}{{- ' ' + m.content + '<|eot|>' }}{%- endif %}{%- endfor %}"
)
TEMPLATES = {"hermes": HERMES, "qwen3": QWEN3, "llama3": LLAMA3, "mistral": MISTRAL}
SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>", "[INST]", "[/INST]"]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def byte_tokenizer(template: str, eos: str, *, vocab_size: int = 600, pieces: Sequence[str] = ()) -> Any:
    """A byte-level BPE trained on a few lines, with the special tokens of all families.

    Args:
        template: Its chat template.
        eos: End of a turn.
        pieces: Texts that are one token each, not special.
    """
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    raw.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["you are standing on a frozen lake, go left or right, up or down. \n\n user assistant tool"] * 9
    raw.train_from_iterator(corpus, trainer)
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*MARKUP, *pieces)])
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=eos)
    wrapped.add_special_tokens({"additional_special_tokens": SPECIAL})
    wrapped.chat_template = template
    return wrapped


class TemplateTokenizer(HFTokenizer):
    """A family's template behind vLLM's handling of messages."""

    def __init__(self, name: str) -> None:
        eos = "<|eot|>" if name in ("llama3", "mistral") else "<|im_end|>"
        super().__init__(byte_tokenizer(TEMPLATES[name], eos))

    def chat(self, body: Mapping[str, Any]) -> list[int]:
        return super().chat({**body, "messages": [_as_vllm(message) for message in body["messages"]]})

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids))


def _as_vllm(message: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message["role"], "content": message.get("content")}
    if isinstance(out["content"], list):
        out["content"] = "".join(part["text"] for part in out["content"])
    if message["role"] == "assistant":
        out["reasoning"] = message.get("reasoning") or message.get("reasoning_content")
        if message.get("tool_calls"):
            out["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _arguments(call)}}
                for call in message["tool_calls"]
            ]
    if message["role"] == "tool":
        out["tool_call_id"] = message.get("tool_call_id")
    return out


def _arguments(call: Mapping[str, Any]) -> Any:
    given = call["function"].get("arguments")
    return json.loads(given) if isinstance(given, str) else given or {}
