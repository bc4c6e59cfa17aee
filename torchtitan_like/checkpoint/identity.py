"""The model of a checkpoint, with what is needed to load and export other formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_like.models.spec import ModelSpec


class SpecialToken(NamedTuple):
    """A token that starts or ends a document."""

    text: str
    id: int


@dataclass(frozen=True)
class Identity:
    """A model, its sizes, and the folders of its assets.

    hf_assets: a folder that may hold weights of the model and their index.
    tokenizer: the tokenizer's folder or file.
    special_tokens: returns the tokens that start and end a document; called when an export needs
        them.
    """

    spec: ModelSpec
    args: Any
    hf_assets: Path
    tokenizer: Path
    special_tokens: Callable[[], tuple[SpecialToken | None, SpecialToken | None]]
