"""Patterns by which published tokenizers split text into words (`pre_tokenizer` in tokenizer.json).

A module of its own, because checking a config reads a tokenizer and must not import numpy.
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

# A rank file of tiktoken does not contain its pattern. The numbers of tokens of published files:
RANK_FILE_PATTERNS = {
    50_256: GPT2_PATTERN,  # r50k_base
    50_280: GPT2_PATTERN,  # p50k_base
    100_256: LLAMA3_PATTERN,  # cl100k_base
    128_000: LLAMA3_PATTERN,  # Llama 3
    151_643: QWEN2_PATTERN,  # Qwen
    163_584: KIMI_PATTERN,  # Moonlight, Kimi
    199_998: GPT_OSS_PATTERN,  # o200k_base
    200_000: GPT_OSS_PATTERN,  # Llama 4
}
