"""A breakpoint() stops one rank, for whoever connects; the others do not notice it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tests.harness.ports import free_ports
from tests.harness.runner import ROOT

PROGRAM = """
def double(number):
    breakpoint()
    return 2 * number
print(double(21))
"""
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def start(port: int) -> Iterator[Start]:
    """A rank of a run with BREAK_RANK=1."""
    started = []

    def start(rank: str) -> subprocess.Popen[str]:
        hook = {"PYTHONBREAKPOINT": "torchtitan_like.monitor.breakpoint.wait_for_person", "PYTHONPATH": str(ROOT)}
        env = {**os.environ, **hook, "RANK": rank, "BREAK_RANK": "1", "BREAK_PORT": str(port)}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def speak(port: int, words: str) -> str:
    """What the debugger answers, up to where it hangs up."""
    give_up = time.monotonic() + 200
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=200) as connection:
                connection.sendall(words.encode())
                return b"".join(iter(lambda: connection.recv(4096), b"")).decode()
        except ConnectionRefusedError:
            assert time.monotonic() < give_up
            time.sleep(0.05)


def test_the_rank_waits_and_others_pass(start: Start, port: int) -> None:
    other, rank = start("0"), start("1")
    assert other.communicate(timeout=200) == ("42\n", "")
    assert rank.poll() is None
    said = speak(port, "p number\nwhere\ncontinue\n")
    assert "(Pdb) 21\n" in said and "double()" in said, said
    output, log = rank.communicate(timeout=200)
    assert (rank.returncode, output) == (0, "42\n")
    assert f"Rank 1 waits at <string>:3 for pdb; on {socket.gethostname()}: nc 127.0.0.1 {port}" in log


def test_quit_ends_the_run(start: Start, port: int) -> None:
    rank = start("1")
    speak(port, "quit\n")
    output, log = rank.communicate(timeout=200)
    assert rank.returncode != 0 and output == "" and "bdb.BdbQuit" in log
