"""Decide whether the server answers a request: token, host, origin, and size."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from dataclasses import dataclass, field
from email.message import Message
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import urlsplit

from torchtitan_like.util.user_folders import stored_secret

TOKEN_BYTES = 32
MAX_BODY = 1024  # bytes
MAX_TARGET = 4096  # characters of a path with its query
LOOPBACK_NAMES = ("localhost", "localhost.localdomain")


class RefusedError(Exception):
    """A request that is not answered, with its status. The text is shown to the client."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Access:
    """Who may use a server. token: None lets everybody on this machine in. host: what it binds to.

    names: of this machine. Browsers send cookies of one host to all of its ports, so the cookie is named after the port.
    """

    token: str | None
    host: str
    port: int
    names: frozenset[str] = field(default_factory=lambda: frozenset(_names()))

    @property
    def cookie(self) -> str:
        """Name of the cookie with the token."""
        return f"titan_{self.port}"

    def check_host(self, headers: Message) -> None:
        """Refuse a request by a name that is not this machine's: DNS rebinding.

        A browser that was tricked into this server sends the name of the attacker's page. The port
        may differ, as in a tunnel.
        """
        hosts = headers.get_all("Host", [])
        host = ", ".join(hosts)
        name = _host_name(host) if len(hosts) == 1 else ""
        if name not in {*LOOPBACK_NAMES, self.host.lower(), *self.names} and not _is_address(name):
            raise RefusedError(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"The Host header is {host[:80]!r}. Expected an IP address, localhost or a name "
                "of this machine. Open the URL that the server printed.",
            )

    def check_token(self, headers: Message) -> None:
        """Refuse a request without the token, as a bearer or in the cookie."""
        if self.token is None:
            return
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        sent = [bearer.strip()] if scheme.lower() == "bearer" else []
        try:
            cookies = SimpleCookie(headers.get("Cookie", ""))
        except CookieError:
            cookies = SimpleCookie()
        sent += [cookies[self.cookie].value] if self.cookie in cookies else []
        if not any(self.is_token(value) for value in sent):
            raise RefusedError(
                HTTPStatus.UNAUTHORIZED,
                "The token is missing or wrong. Expected it as a cookie or as a bearer. "
                "Open the URL that the server printed.",
            )

    def is_token(self, value: str) -> bool:
        """Compare a value with the token, in constant time."""
        expected = (self.token or "").encode()
        return bool(expected) and hmac.compare_digest(value.encode(errors="replace"), expected)

    def check_same_origin(self, headers: Message) -> None:
        """Refuse a write that is not sent by a page of this server."""
        origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site")
        is_same = origin is None or origin == f"http://{headers.get('Host')}"
        if (origin is None and site is None) or not is_same or site not in (None, "same-origin"):
            raise RefusedError(
                HTTPStatus.FORBIDDEN,
                f"The Origin of this request is {str(origin)[:80]!r}. Expected a page of this "
                "server. Use its buttons, or titan run save and titan run stop.",
            )


def check_limits(target: str, headers: Message, *, has_body: bool) -> int:
    """Refuse what no page of this server sends. Return the length of the body in bytes."""
    if len(target) > MAX_TARGET:
        raise RefusedError(HTTPStatus.REQUEST_URI_TOO_LONG, "The path is too long.")
    if "Range" in headers:
        raise RefusedError(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "No page has ranges.")
    if "Transfer-Encoding" in headers:
        raise RefusedError(HTTPStatus.NOT_IMPLEMENTED, "Expected a Content-Length.")
    length = headers.get("Content-Length", "")
    if not length and not has_body:
        return 0
    if not (length.isascii() and length.isdecimal()):
        raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "Expected a Content-Length.")
    if len(length) > 9 or int(length) > MAX_BODY:
        raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"Expected {MAX_BODY} bytes.")
    return int(length)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a server on this host."""
    if host.lower() in LOOPBACK_NAMES:
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def user_token(state: Path) -> str:
    """Return this user's token, stored at first use, so that bookmarks survive a restart.

    A new one if it cannot be stored.
    """
    new = secrets.token_urlsafe(TOKEN_BYTES).encode()
    return (stored_secret(state / "watch.token", new) or new).decode(errors="replace")


def _host_name(host: str) -> str:
    """Return the name in a Host header, in lower case; "" if it is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return ""
    is_plain = parts.username is None and not parts.path and not parts.query
    return (parts.hostname or "") if is_plain else ""


def _names() -> set[str]:
    """Return the names of this machine."""
    return {socket.gethostname().lower(), socket.getfqdn().lower()}


def _is_address(name: str) -> bool:
    try:
        return not ipaddress.ip_address(name).is_unspecified
    except ValueError:
        return False
