"""The server of `titan run watch --web`.

A request never names a file: it names a run, which is looked up in a table. Python's own server is
enough for a few readers, and needs no package on a login node.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote_to_bytes

from torchtitan_like.report.figures import require_bokeh
from torchtitan_like.report.requests import request_save, request_stop, switch_files
from torchtitan_like.report.runs import find_runs
from torchtitan_like.report.web.access import (
    Access,
    RefusedError,
    check_limits,
    is_loopback,
    user_token,
)
from torchtitan_like.report.web.boundary import Boundary
from torchtitan_like.report.web.fleet import Fleet
from torchtitan_like.report.web.index import remove_old
from torchtitan_like.report.web.indexer import Indexer
from torchtitan_like.report.web.live import LiveRun, Message, Position
from torchtitan_like.report.web.pages import index_document
from torchtitan_like.report.web.prometheus import CONTENT_TYPE, render_metrics
from torchtitan_like.util.os_errors import describe_os_error
from torchtitan_like.util.user_folders import user_cache, user_state

MAX_CONNECTIONS = 64
TIMEOUT = 30.0  # seconds for a request to arrive, and for a browser to accept bytes
POLL_SECONDS = 0.5  # between two looks at a run that a browser shows
LIST_SECONDS = 2.0  # between two looks at all runs
KEEP_ALIVE_SECONDS = 15.0  # after which a closed connection is noticed
COOKIE_SECONDS = 30 * 86400
HTML = "text/html; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
LOGGED_IN = (
    '<!DOCTYPE html><html lang="en"><title>Runs</title><link rel="icon" href="data:,">'
    '<meta http-equiv="refresh" content="0;url=/"><a href="/">Runs</a></html>'
)
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
# Word of a request -> how it writes a switch file and describes the effect.
SWITCHES: dict[str, Callable[[Path], str]] = {
    "save": request_save,
    "export": lambda run: request_save(run, export=True),
    "stop": request_stop,
}


def serve(folder: Path, *, host: str, port: int, needs_token: bool) -> None:
    """Serve the runs at and below a folder until Ctrl-C. Prints the URL with the token.

    Raises ValueError for a folder without runs, an address that others can reach without a token,
    or without Bokeh, and OSError.
    """
    require_bokeh()
    if not needs_token and not is_loopback(host):
        raise ValueError(
            f"--no-token with --host {host} lets everybody who reaches this machine stop its runs. "
            "Expected an address of this machine only. Drop --no-token, or use --host 127.0.0.1."
        )
    find_runs(folder)
    cache = user_cache(os.environ) / "run_index"
    if not cache.is_absolute():
        raise ValueError(
            "There is no folder for the index of long runs: HOME and XDG_CACHE_HOME are unset. "
            "Expected one of them. Set XDG_CACHE_HOME to a folder."
        )
    remove_old(cache, time.time())
    token = user_token(user_state(os.environ)) if needs_token else None
    with WatchServer(folder, cache, host=host, port=port, token=token) as server:
        print(f"Watching {folder}: {server.url()}", flush=True)
        server.serve_forever()


@dataclass
class Response:
    """An answer with a body. headers: in addition to `HEADERS`."""

    body: str
    content_type: str = HTML
    status: HTTPStatus = HTTPStatus.OK
    headers: dict[str, str] = field(default_factory=dict)


Stream = Callable[[], list[Message]]  # returns what is new since the last call
# Answers a request. The argument is the part of the path after the first one.
Route = Callable[["Handler", str], "Response | Stream"]


class WatchServer(ThreadingHTTPServer):
    """A server of the runs at and below a folder. Raises ValueError if it cannot listen."""

    daemon_threads = True

    def __init__(
        self, folder: Path, cache: Path, *, host: str, port: int, token: str | None
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.stopping = threading.Event()
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"Cannot listen on {host}, port {port}: {str(error).rstrip('.')}. Expected a free "
                "port and an address of this machine. Choose others with --port and --host."
            ) from error
        indexer = Indexer(cache)
        self.fleet = Fleet(Boundary(folder), indexer)
        self.access = Access(token, host, self.server_address[1])
        indexer.start()

    def url(self) -> str:
        """Return the URL that opens the list of runs."""
        host = self.access.host
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        base = f"http://{f'[{host}]' if ':' in host else host}:{self.access.port}"
        token = self.access.token
        return f"{base}/" if token is None else f"{base}/login?token={quote(token)}"

    def server_close(self) -> None:
        """Close the socket and end all streams."""
        self.stopping.set()
        super().server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or at once if there are too many."""
        if not self._slots.acquire(blocking=False):
            request.sendall(b"HTTP/1.0 503 Service Unavailable\r\n\r\n")
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request and release its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an unexpected error in one line. Ignore a client that has gone."""
        error = sys.exc_info()[1]
        if not isinstance(error, (ConnectionError, TimeoutError)):
            print(f"A request failed: {type(error).__name__}: {error}", file=sys.stderr)


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: WatchServer
    timeout = TIMEOUT
    server_version = "titan"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a request for a page."""
        self._answer(READS)

    def do_POST(self) -> None:
        """Answer a request that writes a switch file."""
        self._answer(WRITES)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing about requests."""

    def _answer(self, routes: dict[str, Route]) -> None:
        try:
            answer = self._find_answer(routes)
        except RefusedError as error:
            answer = Response(f"{error}\n", TEXT, error.status)
        except (OSError, ValueError) as error:
            text = describe_os_error(error) if isinstance(error, OSError) else str(error)
            answer = Response(f"{text}\n", TEXT, HTTPStatus.CONFLICT)
        if isinstance(answer, Response):
            self._send(answer)
        else:
            self._send_stream(answer)

    def _find_answer(self, routes: dict[str, Route]) -> Response | Stream:
        access, is_write = self.server.access, routes is WRITES
        self.num_body_bytes = check_limits(self.path, self.headers, has_body=is_write)
        access.check_host(self.headers)
        path, _, self.query = self.path.partition("?")
        word, _, name = path.removeprefix("/").partition("/")
        if path == "/healthz" and not is_write:
            return Response("ok\n", TEXT)
        if path == "/login" and not is_write:
            return self._log_in()
        access.check_token(self.headers)
        if is_write:
            access.check_same_origin(self.headers)
        if not path.startswith("/") or word not in routes:
            raise RefusedError(HTTPStatus.NOT_FOUND, "There is no such page.")
        return routes[word](self, name)

    def _log_in(self) -> Response:
        """Store the token in a cookie, so that no later URL contains it."""
        access = self.server.access
        token = (parse_qs(self.query).get("token") or [""])[0]
        headers = {}
        if access.token is not None:
            if not access.is_token(token):
                raise RefusedError(HTTPStatus.UNAUTHORIZED, "The token is wrong.")
            headers["Set-Cookie"] = (
                f"{access.cookie}={access.token}; Path=/; Max-Age={COOKIE_SECONDS}; HttpOnly; "
                "SameSite=Strict"
            )
        # A redirect would count as a request of the page with the link, without strict cookies.
        return Response(LOGGED_IN, headers=headers)

    # ---- pages

    def show_list(self, name: str) -> Response:
        """Return the list of runs."""
        if name:
            raise RefusedError(HTTPStatus.NOT_FOUND, "There is no such page.")
        fleet = self.server.fleet
        return Response(index_document(fleet.boundary.root, fleet.rows(time.time()), fleet.note()))

    def follow_list(self, _: str) -> Stream:
        """Return the changes of the list of runs."""
        fleet = self.server.fleet
        shown: dict[str, str] = {}
        next_reading = 0.0

        def changes() -> list[Message]:
            nonlocal next_reading
            if time.monotonic() < next_reading:
                return []
            next_reading = time.monotonic() + LIST_SECONDS
            rows = fleet.rows(time.time())
            changed = {name: row for name, row in rows.items() if shown.get(name) != row}
            shown.clear()
            shown.update(rows)
            names = {"names": list(rows), "rows": changed}
            return [Message("runs", names)] if changed else []

        return changes

    def show_run(self, name: str) -> Response:
        """Return the page of a run."""
        return Response(self._run(name).page(time.time()))

    def follow_run(self, name: str) -> Stream:
        """Return the changes of the page of a run."""
        run = self._run(name)
        sent = self.headers.get("Last-Event-ID") or (parse_qs(self.query).get("from") or [""])[0]
        shown = Position.parse(sent)
        state: dict[str, Any] = {}

        def changes() -> list[Message]:
            nonlocal shown, state
            messages, shown = run.messages(shown, time.time())
            if messages[0].data == state:
                return messages[1:]
            state = messages[0].data
            return messages

        return changes

    def update_run(self, name: str) -> Response:
        """Return the newest content of the page of a run, as JSON."""
        return Response(self._run(name).update(), "application/json")

    def show_metrics(self, _: str) -> Response:
        """Return the numbers of all runs for Prometheus."""
        now = time.time()
        return Response(render_metrics(self.server.fleet.statuses(now), now), CONTENT_TYPE)

    def write_switch(self, name: str) -> Response:
        """Create a switch file of a run."""
        run = self._run(name).run
        body = self.rfile.read(self.num_body_bytes).decode(errors="replace")
        word = (parse_qs(body).get("action") or [""])[0]
        if word not in SWITCHES:
            raise RefusedError(
                HTTPStatus.BAD_REQUEST, f"Expected an action: {', '.join(SWITCHES)}."
            )
        boundary = self.server.fleet.boundary
        boundary.require_run(run)
        for path in switch_files(run)[0]:
            boundary.require(path)
        return Response(f"{SWITCHES[word](run)}\n", TEXT)

    def _run(self, quoted: str) -> LiveRun:
        name = os.fsdecode(unquote_to_bytes(quoted))
        run = self.server.fleet.runs(time.time()).get(name)
        if run is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, "There is no such run.")
        return run

    # ---- responses

    def _send(self, response: Response) -> None:
        body = response.body.encode(errors="replace")
        headers = {
            "Content-Type": response.content_type,
            "Content-Length": str(len(body)),
            **response.headers,
        }
        self._send_head(response.status, headers)
        self.wfile.write(body)

    def _send_head(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_stream(self, stream: Stream) -> None:
        """Send the messages of a stream until the browser or the server ends."""
        self._send_head(HTTPStatus.OK, {"Content-Type": "text/event-stream"})
        last = time.monotonic()
        while True:
            content = b"".join(message.encode() for message in stream())
            if not content and time.monotonic() - last > KEEP_ALIVE_SECONDS:
                content = b": alive\n\n"
            if content:
                self.wfile.write(content)
                last = time.monotonic()
            if self.server.stopping.wait(POLL_SECONDS):
                return


# First part of the path -> what answers it.
READS: dict[str, Route] = {
    "": Handler.show_list,
    "runs": Handler.follow_list,
    "run": Handler.show_run,
    "events": Handler.follow_run,
    "update": Handler.update_run,
    "metrics": Handler.show_metrics,
}
WRITES: dict[str, Route] = {"switch": Handler.write_switch}
