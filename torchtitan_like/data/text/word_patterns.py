"""Patterns by which published tokenizers split text into words.

A tokenizer.json contains its pattern (`pre_tokenizer`). Long documents are split only if it is one
of these. A rank file contains none: it is given by name, or known by the file's SHA-256.
"""

from __future__ import annotations

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
GPT_OSS_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_ENDS}"
)
MISTRAL_NEMO_PATTERN = GPT_OSS_PATTERN.replace(f"{_CONTRACTIONS}?", "").replace(
    r"\p{N}{1,3}", r"\p{N}"
)
_HAN = r"&&[^\p{Han}]"
KIMI_PATTERN = r"[\p{Han}]+|" + GPT_OSS_PATTERN.replace(f"{_UPPER}]", f"{_UPPER}{_HAN}]").replace(
    f"{_LOWER}]", f"{_LOWER}{_HAN}]"
).replace(r"[\r\n/]*", r"[\r\n]*")
PATTERNS = {
    "GPT-2": GPT2_PATTERN,
    "Llama 3": LLAMA3_PATTERN,
    "Qwen 2": QWEN2_PATTERN,
    "gpt-oss": GPT_OSS_PATTERN,
    "Mistral Nemo": MISTRAL_NEMO_PATTERN,
}

# A rank file of tiktoken does not contain its pattern. These names may be given as `pat_str`:
RANK_FILE_PATTERNS = {**PATTERNS, "Kimi": KIMI_PATTERN}
LLAMA3_RANKS = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
# The SHA-256 of published files, and the names of their patterns.
RANK_FILES = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": "GPT-2",  # r50k_base
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": "GPT-2",  # p50k_base
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": "Llama 3",  # cl100k_base
    LLAMA3_RANKS: "Llama 3",
    "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186": "Qwen 2",  # qwen.tiktoken
    "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103": "Kimi",  # Moonlight, Kimi
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": "gpt-oss",  # o200k_base
    "d0bdbaf59b0762c8c807617e2d8ea51420eb1b1de266df2495be755c8e0ed6ed": "gpt-oss",  # Llama 4
}
