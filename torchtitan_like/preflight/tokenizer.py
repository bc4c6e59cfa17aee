"""The tokenizer of the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.config.availability import only_tokens
from torchtitan_like.config.layout_rules import MODEL_KEYS
from torchtitan_like.preflight.folders import missing_at

if TYPE_CHECKING:
    from torchtitan_like.config.findings import Findings

_REPOSITORY = Path(__file__).resolve().parents[2]


def check_tokenizer(findings: Findings, limits: dict[str, int]) -> None:
    """It is there, can be read, and all its ids are in the model's vocabulary."""
    config = findings.config
    key = "model.tokenizer_path" if config.model.tokenizer_path else "model.hf_assets_path"
    path = Path(config.model.tokenizer_folder)
    if config.model.tokenizer_path:
        findings.warning(key, "is an older name", "put the tokenizer into the folder model.hf_assets_path")
    if not path.exists():
        shipped = _REPOSITORY / config.model.tokenizer_folder
        remedy = "scripts/download_assets.py fetches one from the Hub"
        if not path.is_absolute() and shipped.exists():
            remedy = f"start in {_REPOSITORY}, or set it to {shipped.resolve()}"
        findings.missing_file(key, f"a folder with tokenizer.json or a tiktoken .model file; {missing_at(path)}", remedy)
        return
    from torchtitan_like.data.formats.tokenizer import TokenizerError, check_vocabulary, load_tokenizer

    try:
        tokenizer = load_tokenizer(path)
        if "vocab_size" in limits:
            add_bos, add_eos = (
                wanted and not only_tokens(config) for wanted in (config.data.add_bos, config.data.add_eos)
            )
            check_vocabulary(tokenizer, limits["vocab_size"], add_bos=add_bos, add_eos=add_eos)
    except TokenizerError as error:
        involves = (*MODEL_KEYS, "data.add_bos", "data.add_eos")
        findings.error(key, f"a tokenizer that fits the model; {error}", involves=involves)
