"""The tokenizer of the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchtitan_like.check.context import RunContext
from torchtitan_like.check.folders import describe_missing
from torchtitan_like.check.rules.keys import HF_ASSETS, MODEL_KEYS
from torchtitan_like.config.problems import Problem


def check_tokenizer(run: RunContext) -> Iterator[Problem]:
    """Check that the tokenizer exists and is readable, and that the vocabulary has all its ids."""
    config = run.config
    key = "model.tokenizer_path" if config.model.tokenizer_path else HF_ASSETS
    path = Path(config.model.tokenizer_folder)
    if config.model.tokenizer_path:
        remedy = "put the tokenizer into the folder model.hf_assets_path"
        yield Problem(key, None, "is deprecated", remedy, severity="warning")
    if not path.exists():
        remedy = "download one from the Hub with `titan download`"
        missing = describe_missing(path)
        expected = f"a folder with tokenizer.json or a tiktoken .model file; {missing}"
        yield Problem(key, None, expected, remedy, severity="training_error")
        return
    from torchtitan_like.data.errors import TokenizerError
    from torchtitan_like.data.text.tokenizer import check_vocabulary, load_tokenizer

    try:
        tokenizer = load_tokenizer(path)
        if vocab_size := run.size("vocab_size"):
            check_vocabulary(
                tokenizer,
                vocab_size,
                add_bos=config.data.add_bos and config.reads_text,
                add_eos=config.data.add_eos and config.reads_text,
            )
    except TokenizerError as error:
        involves = (*MODEL_KEYS, "data.add_bos", "data.add_eos")
        yield Problem(key, None, f"a tokenizer that fits the model; {error}", involves=involves)
