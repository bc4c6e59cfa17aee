"""The examples in the help of `titan` commands work as they are printed."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.harness.runner import ROOT
from torchtitan_like import cli


def run_example(name: str, folder: Path, **env: str) -> str:
    """Run the example of a command in `folder`, in a process of its own. Returns its stdout."""
    (command,) = (one for one in cli.executable_commands() if one.name == name)
    example = importlib.import_module(f"torchtitan_like.cli.{command.module}").EXAMPLE
    words = shlex.split(example)
    assert words[0] == "titan"
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_like", *words[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- titan download

HUB_FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "model.safetensors": b"not to be downloaded",
}
COMMIT = "c0ffee" + "0" * 34


class HubHandler(BaseHTTPRequestHandler):
    """Answers as the Hub does for one model: its list of files, and each of them."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        sizes = {name: len(text) for name, text in HUB_FILES.items()}
        if path.startswith("/api/models/meta-llama/Llama-3.1-8B/revision/"):
            files = [{"rfilename": name, "size": size} for name, size in sizes.items()]
            self.answer_json({"id": "meta-llama/Llama-3.1-8B", "sha": COMMIT, "siblings": files})
        elif path.startswith("/api/models/meta-llama/Llama-3.1-8B/tree/"):
            entries = [{"path": name, "size": size} for name, size in sizes.items()]
            self.answer_json([{"type": "file", "oid": COMMIT, **entry} for entry in entries])
        elif path.startswith(f"/meta-llama/Llama-3.1-8B/resolve/{COMMIT}/"):
            self.answer(HUB_FILES[path.rpartition("/")[2]], "text/plain")
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def answer_json(self, content: object) -> None:
        self.answer(json.dumps(content).encode(), "application/json")

    def answer(self, content: bytes, content_type: str) -> None:
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


@contextmanager
def local_hub() -> Iterator[str]:
    """Start a server that answers as the Hub. Yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_download(tmp_path: Path) -> None:
    with local_hub() as address:
        output = run_example(
            "download",
            tmp_path,
            HF_ENDPOINT=address,
            HF_HOME=str(tmp_path / "hub"),
            HF_HUB_OFFLINE="0",
        )
    folder = tmp_path / "assets/hf/Llama-3.1-8B"
    downloaded = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    expected = {name: HUB_FILES[name] for name in ("config.json", "tokenizer.json")}
    assert downloaded == expected
    assert output.splitlines()[-1] == "Use it with: --model.hf_assets_path assets/hf/Llama-3.1-8B"
