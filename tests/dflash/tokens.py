"""A tokenizer made on the spot: one token for each character, and chat templates of both kinds."""

from __future__ import annotations

import string
from typing import Any

PLAIN = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('=')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]


def tokenizer(template: str | None = PLAIN) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["[unk]", *(string.ascii_lowercase + " \n=.")]
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="[unk]"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    out = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[unk]", eos_token="<|end|>")
    out.add_special_tokens({"additional_special_tokens": SPECIAL[:3]})
    out.chat_template = template
    return out
