"""A process ends with its exit code after it has written its output and finished its threads."""

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


def test_end_process_waits_for_threads_and_flushes_output(repo_root):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=repo_root, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 70
    assert result.stdout == "unflushed thread done\n"
    assert "logged" in result.stderr


WAITING_PROGRAM = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from torchtitan_like.resilience import end

pool = ThreadPoolExecutor(1)
pool.submit(print, "started", flush=True).result()
pool.submit(lambda: (time.sleep(0.1), print("written", flush=True)))
if "hangs" in sys.argv:
    end.MAX_WAIT_SECONDS = 4
    threading.Thread(target=lambda: time.sleep(1000)).start()
end.end_process(70)
"""


@pytest.mark.parametrize("hangs", [[], ["hangs"]])
def test_an_idle_worker_or_a_hanging_thread_does_not_prevent_the_exit(repo_root, hangs):
    """After a compiled run, the compiler's worker pool is still running."""
    command = [sys.executable, "-c", WAITING_PROGRAM, *hangs]
    result = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stdout) == (70, "started\nwritten\n"), result.stderr


LATE_SIGNAL_PROGRAM = """
import threading, time
from torchtitan_like.resilience.end import end_process

def still_writes():
    while threading.main_thread().is_alive():
        time.sleep(0.05)
    print(" ending", flush=True)
    time.sleep(1000)

print("started", flush=True)
print("unflushed", end="")
threading.Thread(target=still_writes).start()
end_process(75)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_during_exit_does_not_change_the_exit_code(repo_root, signum):
    with subprocess.Popen(
        [sys.executable, "-c", LATE_SIGNAL_PROGRAM],
        cwd=repo_root,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert [process.stdout.readline(), process.stdout.readline()] == [
            "started\n",
            "unflushed ending\n",
        ]
        process.send_signal(signum)
        assert process.wait(timeout=50) == 75
