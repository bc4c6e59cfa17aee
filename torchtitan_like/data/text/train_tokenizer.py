"""Train the byte-level BPE tokenizer of the debug models.

The result is a pure function of the text: training again writes the same bytes.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan_like.data.text.tokenizer import bytes_of_characters
from torchtitan_like.data.text.word_patterns import LLAMA3_PATTERN

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with `vocab_size` tokens; the last two are BOS and EOS."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer


def read_texts(file: Path) -> list[str]:
    """Read the field `text` of JSON lines. Raises OSError, ValueError, KeyError."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json (BOS and EOS) and tokenizer.model (tiktoken)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=True)
    added = {
        str(tokenizer.token_to_id(name)): {"content": name, "special": True} for name in (BOS, EOS)
    }
    config = {
        "added_tokens_decoder": added,
        "bos_token": BOS,
        "eos_token": EOS,
        "pat_str": "Llama 3",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (folder / "tokenizer.model").write_text(_tiktoken_lines(tokenizer), encoding="ascii")


def _tiktoken_lines(tokenizer: Tokenizer) -> str:
    """Format the ordinary tokens as a tiktoken file: base64 of the bytes, rank = id."""
    byte_of = bytes_of_characters()
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    lines = []
    for token, rank in sorted(vocab.items(), key=lambda item: item[1]):
        token_bytes = bytes(byte_of[character] for character in token)
        lines.append(f"{base64.b64encode(token_bytes).decode()} {rank}\n")
    return "".join(lines)
