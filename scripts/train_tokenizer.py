"""Train the byte-level BPE tokenizer of the debug models on the shipped text.

Writes into a folder: tokenizer.json, tokenizer_config.json (names BOS and EOS) and tokenizer.model (a tiktoken file
with the same ids).
The result is a pure function of the text: running it again gives the same bytes.

    python scripts/train_tokenizer.py --output tests/assets/tokenizer
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from torchtitan_like.config.datasets import DATASETS
from torchtitan_like.data.text.fast_bpe import bytes_of_characters
from torchtitan_like.data.text.tokenizer import LLAMA3_PATTERN, load_tokenizer

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


def train(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of ``vocab_size`` tokens, the last two of which are BOS and EOS."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 2, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer


def tiktoken_lines(tokenizer: Tokenizer) -> str:
    """The ordinary tokens as a tiktoken file: base64 of the bytes, rank = id."""
    byte_of = bytes_of_characters()
    ranked = sorted(tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    tokens = ((bytes(byte_of[character] for character in token), rank) for token, rank in ranked)
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in tokens)


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the three files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=True)
    added = {str(tokenizer.token_to_id(name)): {"content": name, "special": True} for name in (BOS, EOS)}
    config = {
        "added_tokens_decoder": added,
        "bos_token": BOS,
        "eos_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "tokenizer.model").write_text(tiktoken_lines(tokenizer), encoding="ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the three files")
    parser.add_argument(
        "--input", type=Path, default=DATASETS["shakespeare"].file, help="JSON lines with a field `text`"
    )
    parser.add_argument("--vocab-size", type=int, default=2048, help="tokens, BOS and EOS included")
    arguments = parser.parse_args()
    with arguments.input.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    write(train(texts, arguments.vocab_size), arguments.output)
    for name in ("tokenizer.json", "tokenizer.model"):
        print(load_tokenizer(arguments.output / name))


if __name__ == "__main__":
    main()
