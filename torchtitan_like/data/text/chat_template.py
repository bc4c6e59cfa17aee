"""Chat templates: a conversation becomes one text, as transformers' `apply_chat_template` renders it.

A template is a Jinja program in `chat_template.jinja` or in `chat_template` of
`tokenizer_config.json`. It comes with a model, perhaps from another person. So it runs in Jinja's
sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_like.data.errors import TokenizerError
from torchtitan_like.util.reading import read_json, read_text

FILE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
# In this file's values of keys such as "bos_token" are names of tokens.
_SPECIAL_TOKEN_FILES = ("special_tokens_map.json", CONFIG)

Message = Mapping[str, Any]  # with "role" and "content"


class ChatTemplate:
    """The template of a tokenizer's folder. Raises TokenizerError if it has none."""

    def __init__(self, folder: Path) -> None:
        path, source = _find_template(folder)
        self.path = path
        self._source = source
        self._special_tokens = _special_tokens(folder)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation, up to the start of the assistant's next message.

        Raises TokenizerError if the template cannot render the messages.
        """
        from jinja2 import TemplateError

        try:
            template = _environment().from_string(self._source)
            text: str = template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
            return text
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise TokenizerError(
                f"{self.path} cannot render the messages: {type(error).__name__}: {error}. "
                "Expected messages in the template's roles and order: correct them"
            ) from error


def _find_template(folder: Path) -> tuple[Path, str]:
    """Return the file of the template and its source."""
    path = folder / FILE
    try:
        if path.exists():
            return path, read_text(path)
        path = folder / CONFIG
        template = read_json(path).get("chat_template") if path.exists() else None
        if isinstance(template, list):  # of named templates
            template = {each["name"]: each["template"] for each in template}.get("default")
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise TokenizerError(
            f"{path} cannot be read: {type(error).__name__}: {error}. Expected a chat template: "
            "download the file again"
        ) from error
    if not isinstance(template, str):
        raise TokenizerError(
            f"{folder} has no chat template. Expected {FILE}, or chat_template in {CONFIG}: give "
            "the tokenizer of a chat model, or prompts of plain text"
        )
    return path, template


def _special_tokens(folder: Path) -> dict[str, str]:
    """Return the names of special tokens that templates contain, such as `bos_token`."""
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_FILES:
        content = read_json(folder / name) if (folder / name).exists() else {}
        for key, value in content.items():
            token = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(token, str):
                tokens[key] = token
    return tokens


def _environment() -> Any:
    """Return the environment that transformers defines for templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's tokens for training. It changes no text."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(
                ("name:endgeneration",), drop_needle=True
            )
            return body

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: object, **options: Any) -> str:  # Jinja's own escapes HTML
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
