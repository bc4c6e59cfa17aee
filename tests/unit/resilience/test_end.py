"""A process ends with its code, its output written and its threads done."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys, threading, time
from torchtitan_like.resilience.end import end_process

logging.basicConfig(stream=sys.stderr)
threading.Thread(target=lambda: (time.sleep(0.3), print("thread done"))).start()
threading.Thread(target=lambda: time.sleep(1000), daemon=True).start()
print("unflushed", end=" ")
logging.warning("logged")
end_process(70)
"""


def test_nothing_is_lost(repo_root):
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=repo_root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 70
    assert done.stdout == "unflushed thread done\n"
    assert "logged" in done.stderr


WAITING = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from torchtitan_like.resilience import end

pool = ThreadPoolExecutor(1)
pool.submit(print, "asked", flush=True).result()
pool.submit(lambda: (time.sleep(0.1), print("written", flush=True)))
if "hangs" in sys.argv:
    end.MAX_WAIT_SECONDS = 4
    threading.Thread(target=lambda: time.sleep(1000)).start()
end.end_process(70)
"""


@pytest.mark.parametrize("hangs", [[], ["hangs"]])
def test_neither_an_idle_worker_nor_a_hanging_thread_keeps_the_process(repo_root, hangs):
    """A compiled run leaves a worker pool of the compiler that is still running."""
    command = [sys.executable, "-c", WAITING, *hangs]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (70, "asked\nwritten\n"), done.stderr


LATE = """
import threading, time
from torchtitan_like.resilience.end import end_process

def still_writes():
    while threading.main_thread().is_alive():
        time.sleep(0.05)
    print(" ending", flush=True)
    time.sleep(1000)

print("told", flush=True)
print("unflushed", end="")
threading.Thread(target=still_writes).start()
end_process(75)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_at_the_very_end_changes_no_code(repo_root, signum):
    with subprocess.Popen([sys.executable, "-c", LATE], cwd=repo_root, stdout=subprocess.PIPE, text=True) as process:
        assert [process.stdout.readline(), process.stdout.readline()] == ["told\n", "unflushed ending\n"]
        process.send_signal(signum)
        assert process.wait(timeout=50) == 75
