"""After the last line of a run nothing is left that could bring the process down while Python shuts down."""

import subprocess
import sys

from tests.harness.runner import ROOT, trainer_environment
from tests.integration.test_resume import arguments
from tests.integration.test_resume import text as text  # a fixture

# Threads are counted by the name that torch gives those which run a gloo group's work: two for each group.
PROGRAM = """
import pathlib, sys
from torchtitan_like.train import main

main(sys.argv[1:])
names = [task.read_text().strip() for task in pathlib.Path("/proc/self/task").glob("*/comm")]
sys.stdout.write(f"gloo threads: {names.count('pt_gloo_runloop')}\\n")  # one write: two ranks share the pipe
"""


def test_the_host_groups_end_before_the_process_does(text, tmp_path):
    """A gloo thread that lets go of its last tensors after Python's end aborts a run that was complete.

    The mesh's one group stays, in DTensor's caches; it has been idle since the last step.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_endpoint=localhost:0"]
    result = subprocess.run(
        [*launcher, "--rdzv_backend=c10d", str(tmp_path / "program.py"),
         *arguments(text, tmp_path / "outputs", **{"training.steps": 2})],
        cwd=ROOT, env=trainer_environment(), capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert [line for line in result.stdout.splitlines() if "gloo threads" in line] == ["gloo threads: 2"] * 2
