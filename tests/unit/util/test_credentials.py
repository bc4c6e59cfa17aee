"""Credentials in text are masked. Other text does not change."""

from __future__ import annotations

import pytest

from torchtitan_like.util.credentials import MASK, mask_text, mask_values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgres://u:p@ss/w@host/db", f"postgres://{MASK}@host/db"),
        ("postgres://u:p/w?x#y@host/db", f"postgres://{MASK}@host/db"),
        ("'https://u:p@h/x?sig=1' failed", f"'https://{MASK}@h/x?{MASK}' failed"),
        ("https://h/callback#access_token=1", f"https://h/callback#{MASK}"),
        ("git+https://token@github.com/o/r", f"git+https://{MASK}@github.com/o/r"),
        ("https://hooks.slack.com/services/T/B/X", f"https://hooks.slack.com/{MASK}"),
        ("https://api.telegram.org/bot1:abc/sendMessage", f"https://api.telegram.org/{MASK}"),
        ("via u:p@proxy:3128", f"via {MASK}@proxy:3128"),
        ("Uid=me;Pwd=a b;Database=d", f"Uid=me;Pwd={MASK} b;Database=d"),
        ("AccountKey=abc==;x=1", f"AccountKey={MASK};x=1"),
        ("Authorization: Basic dTpw", f"Authorization: {MASK}"),
        ("Proxy-Authorization: Bearer abcdefgh", f"Proxy-Authorization: {MASK}"),
        ("-H 'Authorization: Bearer abc'", f"-H 'Authorization: {MASK}'"),
        ("hf_abcdefghijklmnop and AKIA0123456789ABCDEF", f"{MASK} and {MASK}"),
        ("eyJhbGciOiJIUzI1.eyJzdWIiOiIx.c2ln", MASK),
        ("a -----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY----- b", f"a {MASK} b"),
        ("-----BEGIN PRIVATE KEY-----\ntruncated", MASK),
    ],
)
def test_credentials_are_masked(text: str, expected: str) -> None:
    assert mask_text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "hf://datasets/OWNER/NAME@main/data-?.jsonl",
        "git@github.com:owner/repository.git",
        "http://host:8080/path",
        "https://docs.example.org/page.html#a-section",
        "[titan] 2026-01-01 12:00:00,123 - root - INFO - step:  1  loss:  8.0  tps: 3,000  num_tokens: 512",
        "pad_token=tokenizer.pad_token",
        "scores = q[:, 0:n]@W  # (batch, heads)",
        "tokens=12345678 key=value",
        "A basic authorization of the bearer",
        'model.args.dim = 64\nname = "llama3"\n',
    ],
)
def test_other_text_does_not_change(text: str) -> None:
    assert mask_text(text) == text


def test_strings_in_lists_and_tables_are_masked() -> None:
    value = {"a": ["https://u:p@h", 1], "b": {"c": "x"}, "d": None}
    assert mask_values(value) == {"a": [f"https://{MASK}@h", 1], "b": {"c": "x"}, "d": None}
