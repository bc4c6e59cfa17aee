"""Send a message, from the command line or standard input, to a person by mail, webhook or command.

    echo "the run hangs" | python DIR/notify.py --mail you@example.org --webhook
    python DIR/notify.py "the run hangs" --command "wall"
    python -m torchtitan_like.slurm.watchdog job train --notify "python DIR/notify.py --webhook"

--webhook posts {"text": ...} to the address in NOTIFY_WEBHOOK, as Slack, Mattermost and others
accept it. --mail uses sendmail, or the server in SMTP_HOST (host or host:port, default 587):
encrypted, and with SMTP_USER and SMTP_PASSWORD if they are set. MAIL_FROM is the sender. --command
gets the message on its standard input. Secrets are read only from the environment, and never
printed.

All channels are tried, even if one fails. Returns 0 if all succeed, 1 if one fails, and 2 without a
message or a channel. --dry-run prints what would be done.
"""

from __future__ import annotations

import argparse
import getpass
import http.client
import json
import os
import shutil
import smtplib
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from email.message import EmailMessage
from functools import partial

TIMEOUT = 30  # seconds, for each channel


def run_command(command: str, text: str) -> None:
    """Write `text` to the standard input of a shell command. Raises OSError if it fails."""
    done = subprocess.run(command, shell=True, input=text, text=True)
    if done.returncode != 0:
        program = command.split(maxsplit=1)[0]  # its arguments may contain a secret
        raise OSError(f"{program} returned {done.returncode}")


def post(address: str, text: str) -> None:
    """Post {"text": ...} to a webhook. Raises OSError, without the address, which is a secret."""
    body = json.dumps({"text": text}).encode()
    try:
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=TIMEOUT).close()
    except urllib.error.HTTPError as error:
        raise OSError(
            f"the server of NOTIFY_WEBHOOK answered {error.code} {error.reason}"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", type(error).__name__)
        raise OSError(f"the server of NOTIFY_WEBHOOK cannot be reached: {reason}") from None


def user_name() -> str:
    """Return the name of this user, or the number in a container without a name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def mail(to: str, text: str, env: Mapping[str, str]) -> None:
    """Send a mail. Its subject is the first line of `text`. Raises OSError."""
    host = socket.gethostname()
    message = EmailMessage()
    message["Subject"] = f"{host}: {text.splitlines()[0][:150]}"
    message["From"] = env.get("MAIL_FROM") or f"{user_name()}@{host}"
    message["To"] = to
    message.set_content(text)
    if not env.get("SMTP_HOST"):
        program = shutil.which("sendmail", path=f"{env.get('PATH', '')}{os.pathsep}/usr/sbin")
        if program is None:
            raise OSError("sendmail is not installed. Set SMTP_HOST to a mail server.")
        subprocess.run([program, "-t", "-i"], input=message.as_bytes(), check=True, timeout=TIMEOUT)
        return
    server, _, port = env["SMTP_HOST"].partition(":")
    with smtplib.SMTP(server, int(port or 587), timeout=TIMEOUT) as connection:
        connection.starttls(context=ssl.create_default_context())
        if env.get("SMTP_USER"):
            connection.login(env["SMTP_USER"], env.get("SMTP_PASSWORD", ""))
        connection.send_message(message)


def senders_of(
    options: argparse.Namespace, env: Mapping[str, str]
) -> dict[str, Callable[[str], None]]:
    """Return label -> function that sends a text. Raises ValueError if options are missing."""
    if options.webhook and not env.get("NOTIFY_WEBHOOK"):
        raise ValueError("--webhook has no address. Set the environment variable NOTIFY_WEBHOOK.")
    # Labels show only the program, because its arguments may contain a secret.
    senders: dict[str, Callable[[str], None]] = {
        f"command {one.split(maxsplit=1)[0]}": partial(run_command, one)
        for one in options.command
        if one.strip()
    }
    senders |= {f"mail to {one}": partial(mail, one, env=env) for one in options.mail}
    if options.webhook:
        senders["webhook"] = partial(post, env["NOTIFY_WEBHOOK"])
    if not senders:
        raise ValueError("No receiver is given. Expected --command, --mail or --webhook. Add one.")
    return senders


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("message", nargs="?", help="default: standard input")
    parser.add_argument(
        "--command", action="append", default=[], help="what gets the message on its standard input"
    )
    parser.add_argument("--mail", action="append", default=[], metavar="ADDRESS")
    parser.add_argument(
        "--webhook", action="store_true", help="post to the address in NOTIFY_WEBHOOK"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Send the message. Returns the exit code."""
    options = parse(arguments)
    text = (sys.stdin.read() if options.message is None else options.message).strip()
    try:
        if not text:
            raise ValueError(
                "The message is empty. Expected text. Give it as the argument, or on stdin."
            )
        senders = senders_of(options, os.environ)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    failed = False
    for name, send in senders.items():
        if options.dry_run:
            print(f"would be sent by {name}: {text}")
            continue
        try:
            send(text)
        except Exception as error:  # of any kind: try the other channels
            failed = True
            print(f"not sent by {name}: {error}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
