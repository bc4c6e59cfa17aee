"""A local stand-in of the Hugging Face Hub, for the real client: set HF_ENDPOINT to its address."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


class LocalHub:
    """A repository with one commit. downloads: names of the files that clients have downloaded.

    repo: OWNER/NAME of a model, or datasets/OWNER/NAME.
    """

    def __init__(self, repo: str, files: Mapping[str, bytes]) -> None:
        self.repo = repo
        self.files = files
        self.downloads: list[str] = []
        self.address = ""

    @property
    def api(self) -> str:
        return f"/api/{self.repo if self.repo.startswith('datasets/') else f'models/{self.repo}'}"


@contextmanager
def local_hub(repo: str, files: Mapping[str, bytes]) -> Iterator[LocalHub]:
    """Serve a repository. repo, files: see `LocalHub`; the content of each file by its name."""
    hub = LocalHub(repo, files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hub))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Serves as the Hub does: the revision of a repository, the list of its files, and each file."""

    protocol_version = "HTTP/1.1"

    def __init__(self, hub: LocalHub, *arguments: Any) -> None:
        self._hub = hub
        super().__init__(*arguments)

    def do_GET(self) -> None:
        hub, path = self._hub, unquote(urlsplit(self.path).path)
        resolve = f"/{hub.repo}/resolve/{COMMIT}/"
        if path.startswith(f"{hub.api}/revision/"):
            siblings = [{"rfilename": name, "size": len(hub.files[name])} for name in hub.files]
            name = hub.repo.removeprefix("datasets/")
            self._answer_json({"id": name, "sha": COMMIT, "siblings": siblings})
        elif path.startswith(f"{hub.api}/tree/{COMMIT}"):
            folder = path.removeprefix(f"{hub.api}/tree/{COMMIT}").strip("/")
            listed = [name for name in hub.files if name.startswith(folder)]
            entries = [{"path": name, "size": len(hub.files[name])} for name in listed]
            self._answer_json([{"type": "file", "oid": COMMIT, **entry} for entry in entries])
        elif (name := path.removeprefix(resolve)) in hub.files:
            self._answer(hub.files[name], "application/octet-stream")
            if self.command == "GET":
                hub.downloads.append(name)
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _answer_json(self, content: object) -> None:
        self._answer(json.dumps(content).encode(), "application/json")

    def _answer(self, content: bytes, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{len(content):040x}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_unused: object) -> None:
        """Keep the test's output clean."""
