"""notify.py sends messages by command, mail and webhook, and prints no secret."""

from __future__ import annotations

import http.server
import io
import json
import smtplib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan_like.slurm.templates import notify

SECRET = "T0/B0/secret-part"


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_WEBHOOK", "SMTP_HOST", "SMTP_USER", "SMTP_PASSWORD", "MAIL_FROM"):
        monkeypatch.delenv(name, raising=False)
    program = tmp_path / "sendmail"
    program.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/arguments; cat >{tmp_path}/mail\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict]]]:
    """Return posted paths and bodies. The server answers 403 if the path contains `refuse`."""
    posted = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(
                (self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            )
            self.send_response(403 if "refuse" in self.path else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("NOTIFY_WEBHOOK", f"http://127.0.0.1:{server.server_port}/{SECRET}")
        yield posted
        server.shutdown()


def test_a_message_is_sent_by_all_channels(tmp_path: Path, webhook: list) -> None:
    text = "the run hangs\nsince 3:00"
    options = ["--command", f"cat >{tmp_path}/received", "--mail", "you@example.org", "--webhook"]
    assert notify.main([text, *options]) == 0
    assert (tmp_path / "received").read_text() == text
    assert webhook == [(f"/{SECRET}", {"text": text})]
    assert (tmp_path / "arguments").read_text() == "-t -i\n"
    head, _, body = (tmp_path / "mail").read_text().partition("\n\n")
    assert "To: you@example.org" in head and ": the run hangs\n" in head and body == text + "\n"


def test_standard_input_is_the_message(webhook: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("low disk\n"))
    assert notify.main(["--webhook"]) == 0
    assert webhook[0][1] == {"text": "low disk"}


def test_a_dry_run_sends_nothing(
    tmp_path: Path, webhook: list, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--command",
        f"touch {tmp_path}/received",
        "--mail",
        "you@example.org",
        "--webhook",
        "--dry-run",
    ]
    assert notify.main(["x", *options]) == 0
    output = capsys.readouterr().out
    assert [line.split(" by ")[1].split()[0] for line in output.splitlines()] == [
        "command",
        "mail",
        "webhook:",
    ]
    assert (
        webhook == [] and not (tmp_path / "received").exists() and not (tmp_path / "mail").exists()
    )
    assert SECRET not in output


def test_all_channels_are_tried_if_one_fails(
    tmp_path: Path,
    webhook: list,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "sendmail").write_text("#!/bin/sh\nexit 3\n")
    monkeypatch.setenv("NOTIFY_WEBHOOK", f"http://127.0.0.1:1/{SECRET}")
    options = [
        "--command",
        "false",
        "--mail",
        "you@example.org",
        "--webhook",
        "--command",
        f"cat >{tmp_path}/received",
    ]
    assert notify.main(["x", *options]) == 1
    output = capsys.readouterr().err
    assert "not sent by command false: false returned 1" in output and "exit status 3" in output
    assert (
        "not sent by webhook: the server of NOTIFY_WEBHOOK cannot be reached" in output
        and SECRET not in output
    )
    assert (tmp_path / "received").read_text() == "x"


@pytest.mark.parametrize(
    "address", [f"hooks.example.org/{SECRET}", f"http://x:a/{SECRET}", f"http://x/{SECRET} 2"]
)
def test_a_malformed_address_is_not_printed(
    address: str, webhook: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NOTIFY_WEBHOOK", address)
    assert notify.main(["x", "--webhook"]) == 1
    output = capsys.readouterr()
    assert "not sent by webhook: the server of NOTIFY_WEBHOOK cannot be reached" in output.err
    assert SECRET not in output.err + output.out


def test_a_user_without_a_name_sends_as_a_number(
    webhook: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers may run under a user ID without a name."""

    def getuser() -> str:
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr(notify.getpass, "getuser", getuser)
    assert notify.main(["x", "--mail", "you@example.org", "--webhook"]) == 0
    assert f"From: {notify.os.getuid()}@" in (tmp_path / "mail").read_text() and len(webhook) == 1


def test_an_answer_of_403_is_reported(
    webhook: list, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NOTIFY_WEBHOOK", notify.os.environ["NOTIFY_WEBHOOK"] + "/refuse")
    assert notify.main(["x", "--webhook"]) == 1
    assert "answered 403" in capsys.readouterr().err


def test_a_mail_server_gets_the_password_after_encryption(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class Server:
        def __init__(self, host: str, port: int, timeout: float) -> None:
            calls.append((host, port))

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def starttls(self, context: object) -> None:
            calls.append("starttls")

        def login(self, user: str, password: str) -> None:
            calls.append((user, password))

        def send_message(self, message: notify.EmailMessage) -> None:
            calls.append((message["From"], message["To"]))

    monkeypatch.setattr(smtplib, "SMTP", Server)
    settings = {
        "SMTP_HOST": "mx:25",
        "SMTP_USER": "me",
        "SMTP_PASSWORD": "pw",
        "MAIL_FROM": "run@x.org",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert notify.main(["x", "--mail", "you@example.org"]) == 0
    assert calls == [("mx", 25), "starttls", ("me", "pw"), ("run@x.org", "you@example.org")]


@pytest.mark.parametrize(
    ("arguments", "message_part"),
    [
        (["x"], "Expected --command, --mail or --webhook"),
        (["x", "--webhook"], "NOTIFY_WEBHOOK"),
        (["", "--command", "true"], "is empty"),
    ],
)
def test_missing_messages_and_channels_are_refused(
    arguments: list[str], message_part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert notify.main(arguments) == 2
    assert message_part in capsys.readouterr().err
