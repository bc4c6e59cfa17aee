"""Chat templates give the text and the tokens of transformers' `apply_chat_template`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from torchtitan_like.data.errors import TokenizerError
from torchtitan_like.data.text.chat_template import ChatTemplate
from torchtitan_like.data.text.tokenizer import load_tokenizer

from .conftest import ASSETS

MESSAGES = [
    {"role": "system", "content": "Answer <briefly> & 'well'.\n"},
    {"role": "user", "content": "Ĝis la revido!"},
    {"role": "assistant", "content": "Ok"},
    {"role": "user", "content": "Why?"},
]
# Of the kinds that published models have.
TEMPLATES = {
    "headers": (
        "{{- bos_token }}\n{%- for message in messages %}\n"
        "    {{- '<|start|>' + message['role'] + '\\n\\n' + message['content'] | trim + eos_token }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{ '<|start|>assistant\\n\\n' }}{%- endif %}"
    ),
    "blocks on their own lines": (
        "{% for message in messages %}\n    {% if message.role == 'assistant' %}\n"
        "    {% generation %}\n{{ message.content }}\n    {% endgeneration %}\n"
        "    {% else %}\n{{ message | tojson }}\n    {% endif %}\n{% endfor %}\n"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    ),
    "variables": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}{{ tools is none }}{{ documents is none }}{{ strftime_now('%Y') }}{{ unk_token }}"
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / name, tmp_path / name)
    return tmp_path


def write_template(folder: Path, template: object) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": template}
    path.write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_tokens_equal_those_of_transformers(folder: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    write_template(folder, TEMPLATES[name])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    text = ChatTemplate(folder).render(MESSAGES)
    assert text == theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode_with_specials(text)
    assert ids == theirs.apply_chat_template(MESSAGES, tokenize=True, **options)
    assert (tokenizer.bos_id in ids) == (name == "headers")
    assert tokenizer.bos_id not in tokenizer.encode(text), "documents have no special tokens"


def test_tiktoken_file_encodes_special_tokens_of_a_template(tmp_path: Path) -> None:
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(ASSETS / name, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = "<|begin_of_text|>Hi<|end_of_text|>"
    expected = [tokenizer.bos_id, *tokenizer.encode("Hi"), tokenizer.eos_id]
    assert tokenizer.encode_with_specials(text) == expected
    assert tokenizer.bos_id not in tokenizer.encode(text)


def test_template_is_found_in_each_file(folder: Path) -> None:
    write_template(
        folder, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    )
    assert ChatTemplate(folder).render(MESSAGES) == "y"
    (folder / "chat_template.jinja").write_text("{{ messages[1].content }}")
    assert ChatTemplate(folder).render(MESSAGES) == "Ĝis la revido!"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
    ],
)
def test_template_that_fails_is_an_error(folder: Path, template: str, message: str) -> None:
    write_template(folder, template)
    with pytest.raises(TokenizerError, match=f"cannot render the messages: .*{message}"):
        ChatTemplate(folder).render(MESSAGES)


@pytest.mark.parametrize("template", [None, {"default": "x"}, [1]])
def test_folder_without_a_template_is_rejected(folder: Path, template: object) -> None:
    write_template(folder, template)
    with pytest.raises(TokenizerError, match="has no chat template|cannot be read"):
        ChatTemplate(folder)
