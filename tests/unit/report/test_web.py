"""The server of `titan run watch --web`: pages, changes, and requests that it refuses."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

from tests.harness.runner import ROOT
from tests.unit.report.run_folder import (
    SCRIPT,
    event,
    step_row,
    write_killed_run,
    write_rows,
    write_steady_run,
)
from tests.unit.report.test_page import Elements
from torchtitan_like.cli import main
from torchtitan_like.report.web import server as web_server
from torchtitan_like.report.web.access import Access, is_loopback, user_token
from torchtitan_like.report.web.server import WatchServer

TOKEN = "correct-token"
BEARER = f"Authorization: Bearer {TOKEN}"
SECRET = "text-outside-of-the-folder"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: str


class Client:
    """Sends requests to a server in this process. A request that is not answered fails."""

    def __init__(self, folder: Path, cache: Path, token: str | None = TOKEN) -> None:
        self.folder = folder
        self.server = WatchServer(folder, cache, host="127.0.0.1", port=0, token=token)
        self.port = self.server.access.port
        self._thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def send(self, method: str, path: str, body: str | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {"Authorization": f"Bearer {TOKEN}", **fields})
        response = connection.getresponse()
        content = response.read().decode()
        connection.close()
        return Answer(response.status, dict(response.headers), content)

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, **headers)

    def post(self, name: str, action: str, **headers: str) -> Answer:
        fields = {
            "Content_Type": "application/x-www-form-urlencoded",
            "Origin": f"http://127.0.0.1:{self.port}",
            **headers,
        }
        return self.send("POST", f"/switch/{quote(name, safe='')}", f"action={action}", **fields)

    def send_raw(self, request: bytes) -> tuple[int, bytes]:
        """Send bytes. Return the status, or 0 without one, and the whole answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while part := connection.recv(65536):
                answer += part
        return int(answer.split()[1]) if answer.startswith(b"HTTP/") else 0, answer

    def stream(self, path: str) -> http.client.HTTPResponse:
        """Open a stream of server-sent events."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
        return connection.getresponse()


def next_event(stream: http.client.HTTPResponse, kind: str) -> dict[str, Any]:
    """Read a stream up to the next event of a kind; return its data."""
    lines = iter(stream.readline, b"")
    for line in lines:
        if line == f"event: {kind}\n".encode():
            data: dict[str, Any] = json.loads(next(lines).removeprefix(b"data: "))
            return data
    raise AssertionError(f"no event {kind}")


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A server of two runs, `steady` and `group/killed`, next to a file that it must not read."""
    monkeypatch.setattr(web_server, "POLL_SECONDS", 0.01)
    write_steady_run(tmp_path / "runs/steady")
    write_killed_run(tmp_path / "runs/group/killed")
    (tmp_path / "secret.txt").write_text(SECRET)
    client = Client(tmp_path / "runs", tmp_path / "cache")
    yield client
    client.close()


# ---- requests that are refused

REFUSED: dict[str, tuple[int, str]] = {
    "a path to the parent folder": (404, f"GET /run/../../secret.txt HTTP/1.1|{BEARER}"),
    "an encoded path": (404, f"GET /run/..%2f..%2fsecret.txt HTTP/1.1|{BEARER}"),
    "a path that is encoded twice": (404, f"GET /run/..%252f..%252fsecret.txt HTTP/1.1|{BEARER}"),
    "a path below a run": (404, f"GET /run/steady%2fconfig.toml HTTP/1.1|{BEARER}"),
    "a path through a run": (404, f"GET /run/steady%2f..%2fgroup HTTP/1.1|{BEARER}"),
    "an absolute path": (404, f"GET /run//etc/passwd HTTP/1.1|{BEARER}"),
    "backslashes": (404, f"GET /run/..%5c..%5csecret.txt HTTP/1.1|{BEARER}"),
    "overlong UTF-8": (404, f"GET /run/%c0%ae%c0%ae%c0%afsecret.txt HTTP/1.1|{BEARER}"),
    "a NUL": (404, f"GET /run/steady%00.html HTTP/1.1|{BEARER}"),
    "an update of a path": (404, f"GET /update/..%2fsecret.txt HTTP/1.1|{BEARER}"),
    "events of a path": (404, f"GET /events/..%2fsecret.txt HTTP/1.1|{BEARER}"),
    "a switch of a path": (404, "POST /switch/..%2f.. HTTP/1.1|{post}"),
    "a URL of another host": (404, f"GET http://evil.example/run/steady HTTP/1.1|{BEARER}"),
    "a page that does not exist": (404, f"GET /static/page.js HTTP/1.1|{BEARER}"),
    "a write as a read": (404, f"GET /switch/steady?action=stop HTTP/1.1|{BEARER}"),
    "a huge range": (416, f"GET /run/steady HTTP/1.1|{BEARER}|Range: bytes=0-99999999999999999"),
    "many ranges": (416, f"GET / HTTP/1.1|{BEARER}|Range: bytes=" + "0-," * 2000 + "0-"),
    "a huge header": (431, f"GET / HTTP/1.1|{BEARER}|X: " + "x" * 70_000),
    "many headers": (431, f"GET / HTTP/1.1|{BEARER}|" + "|".join(f"X{n}: 1" for n in range(200))),
    "a long path": (414, f"GET /run/{'x' * 5000} HTTP/1.1|{BEARER}"),
    "a very long path": (414, f"GET /run/{'x' * 70_000} HTTP/1.1|{BEARER}"),
    "a huge body": (
        413,
        "POST /switch/steady HTTP/1.1|{login}|{origin}|Content-Length: 99999999999",
    ),
    "a body of chunks": (501, "POST /switch/steady HTTP/1.1|{post}|Transfer-Encoding: chunked"),
    "a body without length": (411, "POST /switch/steady HTTP/1.1|{login}|{origin}"),
    "a negative length": (411, "POST /switch/steady HTTP/1.1|{login}|{origin}|Content-Length: -1"),
    "no token": (401, "GET / HTTP/1.1"),
    "no token for metrics": (401, "GET /metrics HTTP/1.1"),
    "a wrong token": (401, "GET / HTTP/1.1|Authorization: Bearer wrong-token"),
    "half of the token": (401, f"GET / HTTP/1.1|Authorization: Bearer {TOKEN[:-1]}"),
    "an empty token": (401, "GET / HTTP/1.1|Authorization: Bearer "),
    "a token in other letters": (401, "GET / HTTP/1.1|Authorization: Bearer c\u00f6rrect-token"),
    "the token as a password": (401, f"GET / HTTP/1.1|Authorization: Basic {TOKEN}"),
    "the cookie of another port": (401, f"GET / HTTP/1.1|Cookie: titan_1={TOKEN}"),
    "a malformed cookie": (401, "GET / HTTP/1.1|Cookie: titan_{port}=;;=\x01"),
    "the token in the URL": (401, f"GET /?token={TOKEN} HTTP/1.1"),
    "a login with a wrong token": (401, "GET /login?token=wrong HTTP/1.1"),
    "a login without a token": (401, "GET /login HTTP/1.1"),
    "a write without a token": (401, "POST /switch/steady HTTP/1.1|{origin}|{length}"),
    "a write from another site": (
        403,
        "POST /switch/steady HTTP/1.1|{login}|{length}|Origin: http://evil.example",
    ),
    "a write from another port": (
        403,
        "POST /switch/steady HTTP/1.1|{login}|{length}|Origin: http://127.0.0.1:1",
    ),
    "a write from a sandbox": (403, "POST /switch/steady HTTP/1.1|{login}|{length}|Origin: null"),
    "a write without an origin": (403, "POST /switch/steady HTTP/1.1|{login}|{length}"),
    "a write that a browser marks as cross-site": (
        403,
        "POST /switch/steady HTTP/1.1|{post}|Sec-Fetch-Site: cross-site",
    ),
    "a write of a sibling site": (
        403,
        "POST /switch/steady HTTP/1.1|{login}|{length}|Sec-Fetch-Site: same-site",
    ),
    "an unknown switch": (400, "POST /switch/steady HTTP/1.1|{post}"),
    "another method": (501, f"PUT /switch/steady HTTP/1.1|{BEARER}"),
    "a trace": (501, f"TRACE / HTTP/1.1|{BEARER}"),
    "another protocol": (0, f"GET / HTTP/9.0|{BEARER}"),
}
HOSTS = {
    "a rebound name": "Host: evil.example:{port}",
    "a name that starts like ours": "Host: localhost.evil.example",
    "a login in the host": "Host: 127.0.0.1@evil.example",
    "no host": "X: 1",
    "two hosts": "Host: 127.0.0.1|Host: evil.example",
    "a path in the host": "Host: 127.0.0.1/evil",
    "every address": "Host: 0.0.0.0:{port}",
}


def build_request(client: Client, text: str, host: str = "Host: 127.0.0.1:{port}") -> bytes:
    first, *headers = text.split("|")
    request = "\r\n".join([first, host.replace("|", "\r\n"), *headers]) + "\r\n\r\n"
    cookie = f"Cookie: other=1; titan_{client.port}={TOKEN}"
    origin = f"Origin: http://127.0.0.1:{client.port}"
    for key, value in {
        "{post}": f"{cookie}\r\n{origin}\r\nContent-Length: 0",
        "{login}": cookie,
        "{origin}": origin,
        "{length}": "Content-Length: 0",
        "{port}": str(client.port),
    }.items():
        request = request.replace(key, value)
    return request.encode()


def files_below(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


def test_hostile_requests_are_refused(client: Client, tmp_path: Path) -> None:
    before = files_below(tmp_path / "runs")
    for name, (status, text) in REFUSED.items():
        found, answer = client.send_raw(build_request(client, text))
        assert found == status, (name, answer[:200])
        assert SECRET.encode() not in answer and b"steady</a>" not in answer, name
    for name, host in HOSTS.items():
        for text in (f"GET / HTTP/1.1|{BEARER}", "GET /healthz HTTP/1.1"):
            found, answer = client.send_raw(build_request(client, text, host))
            assert found == 421 and b"steady" not in answer, name
    assert files_below(tmp_path / "runs") == before
    assert client.get("/run/steady").status == 200


@pytest.mark.parametrize(
    "request_of",
    [f"GET / HTTP/1.1|{BEARER}", "GET / HTTP/1.1|Cookie: titan_{port}=" + TOKEN],
    ids=["bearer", "cookie"],
)
@pytest.mark.parametrize(
    "host", ["127.0.0.1:{port}", "localhost:9999", "[::1]:{port}", "10.1.2.3", "LOCALHOST"]
)
def test_the_token_lets_in_through_a_tunnel(client: Client, request_of: str, host: str) -> None:
    status, answer = client.send_raw(build_request(client, request_of, f"Host: {host}"))
    assert status == 200 and b"steady</a>" in answer


def test_no_more_than_some_connections_are_answered(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [client.stream("/runs") for _ in range(web_server.MAX_CONNECTIONS)]
    assert {stream.status for stream in streams} == {200}
    status, _ = client.send_raw(b"")
    assert status == 503


def test_healthz_needs_no_token(client: Client) -> None:
    assert client.send_raw(build_request(client, "GET /healthz HTTP/1.1"))[0] == 200


def test_the_printed_url_stores_the_token_in_a_cookie(client: Client) -> None:
    path = client.server.url().removeprefix(f"http://127.0.0.1:{client.port}")
    answer = client.get(path, Authorization="none")
    cookie = answer.headers["Set-Cookie"]
    assert answer.status == 200 and 'content="0;url=/"' in answer.body
    assert cookie.startswith(f"titan_{client.port}={TOKEN};")
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie


def test_without_a_token_other_sites_are_still_refused(client: Client, tmp_path: Path) -> None:
    open_client = Client(tmp_path / "runs", tmp_path / "cache", token=None)
    try:
        assert open_client.get("/", Authorization="none").status == 200
        rebound = build_request(open_client, "GET / HTTP/1.1", "Host: evil.example")
        assert open_client.send_raw(rebound)[0] == 421
        assert open_client.post("steady", "stop", Origin="http://evil.example").status == 403
        assert open_client.post("steady", "stop", Sec_Fetch_Site="cross-site").status == 403
    finally:
        open_client.close()


def test_every_answer_forbids_embedding_and_caching(client: Client) -> None:
    for path in ("/", "/run/steady", "/metrics", "/healthz", "/nothing"):
        headers = client.get(path).headers
        assert headers["X-Frame-Options"] == "DENY" and headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers


def test_the_token_of_a_user_is_kept_and_private(tmp_path: Path) -> None:
    token = user_token(tmp_path)
    assert token == user_token(tmp_path) and len(token) >= 43
    assert (tmp_path / "watch.token").stat().st_mode & 0o077 == 0
    (tmp_path / "file").touch()
    assert user_token(tmp_path / "file") != user_token(tmp_path / "file")


def test_a_token_of_other_letters_is_compared(tmp_path: Path) -> None:
    assert not Access("a", "127.0.0.1", 1, frozenset()).is_token("ä\udcff")
    assert not Access(None, "127.0.0.1", 1, frozenset()).is_token("")


# ---- the folder


LINKS = (
    "config.toml",
    "metrics.jsonl",
    "events.jsonl",
    "eval.jsonl",
    "metrics.discarded-2.jsonl",
    "exit.json",
    "attempts",
    "attempts/3",
    "attempts/3/environment",
    "attempts/3/environment/git.txt",
    "attempts/3/logs/rank0.log",
    "attempts/3/heartbeat/rank-0.json",
    "attempts/2/errors/first.json",
    "checkpoint/step-3/manifest.json",
    "checkpoint/step-3",
    "checkpoint",
)


def write_outside(folder: Path) -> Path:
    """A folder whose every file contains the secret, in the places of `LINKS`."""
    for name in LINKS:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix:
            row = step_row(3, 5.0, kind=SECRET, event=SECRET, files={}, reason=SECRET, code=0)
            path.write_text(json.dumps(row) + "\n")
    (folder / "config.toml").write_text(f'[job]\ndescription = "{SECRET}"\n')
    return folder


@pytest.mark.parametrize("name", LINKS)
def test_links_out_of_the_folder_are_not_followed(
    client: Client, tmp_path: Path, name: str
) -> None:
    outside = write_outside(tmp_path / "outside")
    run = client.folder / "group/killed"
    target = run / name
    if target.is_dir():
        target.rename(tmp_path / "old")
    target.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(outside / name)
    answers = [client.get(path) for path in ("/", "/run/group%2Fkilled", "/metrics")]
    assert all(SECRET not in answer.body and answer.status == 200 for answer in answers)
    assert "leads out of" in answers[1].body
    for action in ("save", "export", "stop"):
        assert client.post("group/killed", action).status == 409


def test_links_inside_the_folder_are_followed(client: Client) -> None:
    run = client.folder / "linked"
    run.mkdir()
    for name in ("config.toml", "metrics.jsonl", "events.jsonl"):
        (run / name).symlink_to(client.folder / "steady" / name)
    assert "loss 7.8000" in client.get("/run/linked").body


def test_runs_behind_links_are_not_listed(client: Client, tmp_path: Path) -> None:
    write_steady_run(tmp_path / "elsewhere/other-run")
    (client.folder / "link").symlink_to(tmp_path / "elsewhere")
    page = client.get("/").body
    assert "other-run" not in page and "Not shown: 1 runs" in page
    assert client.get("/run/link%2Fother-run").status == 404


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.toml", "attempts/3/logs/rank0.log"])
def test_pipes_do_not_stop_the_server(client: Client, name: str) -> None:
    path = client.folder / "group/killed" / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    assert "is a device or a pipe" in client.get("/run/group%2Fkilled").body
    assert client.get("/").status == 200


def test_files_of_a_manifest_outside_of_its_checkpoint_are_not_looked_at(client: Client) -> None:
    folder = client.folder / "steady/checkpoint/step-5"
    files = {"../../../../secret.txt": {"size": 1}, "/etc/passwd": {"size": 1}}
    write_rows(folder / "manifest.json", [{"step": 5, "kind": "full", "files": files}])
    page = client.get("/run/steady").body
    assert "is outside of the checkpoint" in page and "bytes, expected" not in page


# ---- switches


@pytest.fixture
def live_run(client: Client) -> Path:
    """A run without exit.json that saves checkpoints."""
    run = client.folder / "steady"
    (run / "config.toml").write_text("[training]\nsteps = 20\n[checkpoint]\nenable = true\n")
    return run


@pytest.mark.parametrize(
    ("action", "file"), [("save", "SAVE"), ("export", "EXPORT"), ("stop", "KILL")]
)
@pytest.mark.parametrize("header", ["Origin", "Sec-Fetch-Site"])
def test_a_button_writes_its_switch_file(
    client: Client, live_run: Path, action: str, file: str, header: str
) -> None:
    headers = {} if header == "Origin" else {"Origin": "", "Sec_Fetch_Site": "same-origin"}
    if header != "Origin":
        request = build_request(
            client,
            "POST /switch/steady HTTP/1.1|{login}|Sec-Fetch-Site: same-origin|Content-Length: "
            f"{len(f'action={action}')}",
        )
        assert client.send_raw(request + f"action={action}".encode())[0] == 200
    else:
        answer = client.post("steady", action, **headers)
        assert answer.status == 200 and f"{live_run / file} is created" in answer.body
    assert (live_run / file).exists()
    assert {path.name for path in live_run.iterdir()} & {"SAVE", "EXPORT", "KILL"} == {file}


def test_a_run_that_would_ignore_a_switch_answers_why(client: Client) -> None:
    answer = client.post("group/killed", "save")
    assert answer.status == 409 and "checkpoint.enable is false" in answer.body
    assert not (client.folder / "group/killed/SAVE").exists()


@pytest.mark.parametrize("way", ["setting", "link"])
def test_no_switch_is_written_outside_of_the_folder(
    client: Client, live_run: Path, tmp_path: Path, way: str
) -> None:
    outside = tmp_path / "KILL"
    if way == "setting":
        with (live_run / "config.toml").open("a") as file:
            file.write(f'[resilience]\nkill_switch_path = "{outside}"\n')
    else:
        (live_run / "KILL").symlink_to(outside)
    answer = client.post("steady", "stop")
    assert answer.status == 409 and "leads out of" in answer.body and not outside.exists()


# ---- pages and changes


def test_the_list_shows_every_run(client: Client) -> None:
    answer = client.get("/")
    text = " ".join(Elements(answer.body).texts)
    for shown in (
        "steady",
        "group/killed",
        "done (code 0) at step 8",
        "20 of 20 (100 %)",
        "7.8000",
    ):
        assert shown in text, shown
    assert 'href="/run/group%2Fkilled"' in answer.body


def test_a_new_row_is_sent(client: Client) -> None:
    page = client.get("/run/steady").body
    shown = re.search(r"&quot;id&quot;: &quot;([^&]+)&quot;", page)
    assert shown is not None
    stream = client.stream(f"/events/steady?from={shown[1]}")
    assert "step 20 of 20" in next_event(stream, "state")["html"]
    with (client.folder / "steady/metrics.jsonl").open("a") as file:
        file.write(json.dumps(step_row(21, 1060.0, loss=0.5)) + "\n")
    points = next_event(stream, "rows")["points"]
    assert points["0/loss"] == {
        "step": [21.0],
        "tokens": [1344.0],
        "hours": [60 / 3600],
        "value": [0.5],
    }


def test_the_list_is_followed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "LIST_SECONDS", 0.0)
    stream = client.stream("/runs")
    first = next_event(stream, "runs")
    assert first["names"] == ["group/killed", "steady"] and len(first["rows"]) == 2
    with (client.folder / "steady/metrics.jsonl").open("a") as file:
        file.write(json.dumps(step_row(21, 1060.0, loss=0.5)) + "\n")
    while "0.5000" not in next_event(stream, "runs")["rows"].get("steady", ""):
        pass  # ages change, too


def test_a_folder_may_be_a_run(client: Client, tmp_path: Path) -> None:
    single = Client(client.folder / "steady", tmp_path / "cache")
    try:
        assert 'href="/run/steady"' in single.get("/").body
        assert single.get("/run/steady").status == 200
    finally:
        single.close()


def test_names_and_texts_with_html_are_escaped(client: Client) -> None:
    attack = "<script>attack()<"
    name = f"{attack}\udcff"
    run = write_killed_run(client.folder / os.fsdecode(name.encode(errors="surrogateescape")))
    write_rows(run / "exit.json", [{"reason": SCRIPT, "code": 1, "step": 8}])
    sources = {SCRIPT: {"loss": 5.0}}
    write_rows(run / "metrics.jsonl", [step_row(n, 108.0 + n, sources=sources) for n in (1, 2)])
    write_rows(run / "events.jsonl", [event(SCRIPT, 109.0, step=2, detail=SCRIPT)])
    path = quote(os.fsencode(run.name), safe="")
    plain, attacked = client.get("/run/steady").body, client.get(f"/run/{path}").body
    count = Elements(plain).names.count
    assert Elements(attacked).names.count("script") == count("script")
    listing = client.get("/").body
    assert Elements(listing).names.count("script") == 1 and "attack()" in listing
    html = [next_event(client.stream(f"/events/{path}"), "state")["html"]]
    update = json.loads(client.get(f"/update/{path}").body)
    html += [section["html"] for section in update["sections"]] + update["captions"]
    assert all("script" not in Elements(text).names for text in html)
    assert any("attacked" in text for text in html)


def test_a_browser_runs_the_scripts_of_the_page_only(client: Client) -> None:
    for path, num_scripts in (("/", 1), ("/run/steady", 4)):
        page = client.get(path).body
        policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
        assert policy is not None
        assert policy[1].count("sha256-") >= num_scripts
        assert "script-src 'sha256-" in policy[1] and "connect-src 'self'" in policy[1]
        assert "unsafe-inline" not in policy[1].partition("style-src")[0]


def test_prometheus_reads_the_numbers(client: Client) -> None:
    run = client.folder / 'a"b'
    write_rows(
        run / "metrics.jsonl",
        [step_row(1, 1.0, tps=5.0, mfu=40.5), step_row(2, 2.0, loss="nan", grad_norm="-inf")],
    )
    (run / "config.toml").write_text("")
    answer = client.get("/metrics")
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.body.splitlines()
    for line in (
        'titan_run_step{run="a\\"b"} 2',
        'titan_run_loss{run="a\\"b"} NaN',
        'titan_run_grad_norm{run="a\\"b"} -Inf',
        'titan_run_tokens_per_second_per_device{run="a\\"b"} 5.0',
        'titan_run_mfu_percent{run="a\\"b"} 40.5',
        'titan_run_loss{run="steady"} 7.8',
        'titan_run_state{run="group/killed",state="stopped"} 1',
        'titan_run_state{run="group/killed",state="running"} 0',
    ):
        assert line in lines, line
    age = next(line for line in lines if line.startswith('titan_run_step_age_seconds{run="steady"'))
    assert float(age.split()[-1]) > 1e9
    for name in ("loss", "state"):
        assert lines.count(f"# TYPE titan_run_{name} gauge") == 1
    values = [line for line in lines if not line.startswith("#")]
    assert all(
        re.fullmatch(r'titan_run_\w+\{run="(\\.|[^"\\])+"(,state="\w+")?\} \S+', one)
        for one in values
    )


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-token", "--host", "0.0.0.0"], "lets everybody who reaches this machine"),
        (["--no-token", "--host", "example.com"], "lets everybody who reaches this machine"),
        (["--port", "99999"], "Cannot listen on 127.0.0.1, port 99999"),
        (["--host", "203.0.113.1", "--port", "0"], "Cannot listen on 203.0.113.1, port 0"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    run = write_steady_run(tmp_path / "run")
    assert main(["run", "watch", str(run), "--web", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Expected" in error


def test_a_folder_without_runs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "watch", str(tmp_path), "--web"]) == 2
    assert "contains no run" in capsys.readouterr().err


def test_addresses_of_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "host.example", "")))


SERVE = """
import sys, threading, urllib.request
from torchtitan_like.cli import main
from torchtitan_like.report.web import server

def visit(self, poll_interval=0.5):
    threading.Thread(target=server.ThreadingHTTPServer.serve_forever, args=(self,)).start()
    request = urllib.request.Request(f"http://127.0.0.1:{self.access.port}/run/run")
    request.add_header("Authorization", f"Bearer {self.access.token}")
    print("page:", b"Curves" in urllib.request.urlopen(request).read())
    self.shutdown()

server.WatchServer.serve_forever = visit
code = main(["run", "watch", sys.argv[1], "--web", "--port", "0"])
print("torch:", "torch" in sys.modules, "code:", code)
"""


def test_the_command_serves_without_torch(tmp_path: Path) -> None:
    run = write_steady_run(tmp_path / "run")
    folders = {f"XDG_{name}_HOME": str(tmp_path / name) for name in ("CACHE", "STATE")}
    process = subprocess.run(
        [sys.executable, "-c", SERVE, run],
        env={**os.environ, "PYTHONPATH": str(ROOT), **folders},
        capture_output=True,
        text=True,
    )
    first, *others = process.stdout.splitlines()
    token = (tmp_path / "STATE/torchtitan_like/watch.token").read_text()
    assert re.fullmatch(rf"Watching {run}: http://127\.0\.0\.1:\d+/login\?token={token}", first)
    assert others == ["page: True", "torch: False code: 0"], process.stderr
    assert (tmp_path / "CACHE/torchtitan_like/run_index").is_dir()
    assert {path.name for path in run.iterdir()} == {"config.toml", "metrics.jsonl", "events.jsonl"}
