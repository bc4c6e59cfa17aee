"""Mask credentials in text before it is written: log lines, errors, configs, arguments, diffs.

The filter detects the *forms* of credentials. It cannot detect a plain word as a password. Values
of environment variables are therefore written only for an allow-list
(`torchtitan_like.monitor.attempt.RECORDED`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "<masked>"

# A URL ends at a blank or a quote. The Hub's paths (hf://) have no login; "@" and "?" have other
# meanings there.
_URL = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)(?P<rest>[^\s\"'<>`\\]+)", re.IGNORECASE)
_OPAQUE_SCHEMES = ("hf://",)
_WEBHOOK = re.compile(r"hook|api\.telegram\.org", re.IGNORECASE)

_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
_KNOWN_TOKEN = re.compile(
    r"\b(?:hf_|gh[opsur]_|github_pat_|glpat-|sk-|sk_live_|rk_live_|pk_live_|xox[abeoprs]-|npm_|pypi-|nvapi-|dop_v1_"
    r"|SG\.|ya29\.|AIza)[\w.-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"  # a JSON Web Token
)
_HEADER = re.compile(
    r"(?P<name>\b(?:proxy-)?authorization\s*[:=]\s*|\bcookie\s*:\s*)[^\s\"']+(?:[ \t]+[^\s\"']+)?"
    r"|\b(?P<bearer>bearer\s+)[\w.+/=~-]{8,}",
    re.IGNORECASE,
)
# password=..., as in connection strings.
_PAIR = re.compile(
    r"(?P<name>(?:password|passwd|passphrase|pwd|secret|api[_-]?key|access[_-]?key|account[_-]?key|private[_-]?key"
    r"|shared[_-]?access[_-]?(?:key|signature)|signature|\bsig)=)[^\s;&,\"']+"
    r"|(?P<token>token=)(?=[\w.-]*\d)[\w.-]{8,}",
    re.IGNORECASE,
)
# user:password@host without a scheme, as in a proxy's address.
_LOGIN = re.compile(r"(?<![\w/:.@-])[\w.+%-]+:[^\s@/\"'\[\](){}<>,]+@(?=[A-Za-z0-9])")

_SECRET_NAME = re.compile(
    r"(?<!tik)token(?!iz)|secret|passw|passphrase|credential|api_?key|access_?key|private|auth|cookie|signature|jwt"
    r"|(^|_)(key|keys|pat|pass|pw|pwd|pin|dsn|sas|hmac)(_|$)",
    re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    """Return True if a variable or setting of this name most likely holds a secret."""
    return _SECRET_NAME.search(name) is not None


def mask_text(text: str) -> str:
    """Mask logins and queries of URLs, tokens, passwords and authorization headers in `text`."""
    text = _KEY_BLOCK.sub(MASK, text)
    if "://" in text:
        text = _URL.sub(_mask_url, text)
    text = _KNOWN_TOKEN.sub(MASK, text)
    text = _HEADER.sub(lambda match: f"{match['name'] or match['bearer']}{MASK}", text)
    if "=" in text:
        text = _PAIR.sub(lambda match: f"{match['name'] or match['token']}{MASK}", text)
    return _LOGIN.sub(f"{MASK}@", text) if "@" in text else text


def mask_values(value: Any) -> Any:
    """Return `value` with `mask_text` applied to every string in its lists and mappings."""
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, Mapping):
        return {key: mask_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask_values(item) for item in value]
    return value


def _mask_url(match: re.Match[str]) -> str:
    scheme, rest = match["scheme"], match["rest"]
    if scheme.lower() in _OPAQUE_SCHEMES:
        return scheme + rest
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    # A password may contain / ? # @: if there may be a login, mask everything up to the last "@".
    if "@" in rest and ("@" in authority or ":" in authority):
        rest = f"{MASK}@{rest.rpartition('@')[2]}"
    rest, question, _ = rest.partition("?")
    rest, hash_sign, fragment = rest.partition("#")
    query = (
        f"?{MASK}" if question else f"#{MASK if '=' in fragment else fragment}" if hash_sign else ""
    )
    if _WEBHOOK.search(rest):  # the secret is a part of the path
        rest = f"{rest.partition('/')[0]}/{MASK}"
    return f"{scheme}{rest}{query}"
