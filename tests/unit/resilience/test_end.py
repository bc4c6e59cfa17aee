"""A process ends with its code, its output written and its threads done."""

import subprocess
import sys

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
