"""A Slurm cluster of three nodes on this machine, with the distribution's packages.

On the third node, jobs of the partition `urgent` preempt jobs of `low`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.harness.ports import free_ports

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
os.environ["PATH"] += ":/usr/sbin:/sbin"  # the daemons' folders, which some shells omit
NODES = ("n1", "n2", "n3")
CPUS = 16  # per node, independent of this machine

# A requeued job waits until its credential expires: after 120 s by default and 5 s at least. Slurm
# checks time limits every 30 s.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=20
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs={cpus}
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs={cpus}
NodeName=n3 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[3]} CPUs={cpus}
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE OverSubscribe=YES PreemptMode=OFF
PartitionName=low Nodes=n3 MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n3 MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""


def missing_programs_message() -> str | None:
    """Return None if all programs are installed, otherwise the missing ones and a command."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return (
        f"{', '.join(missing)} not found: apt-get install {' '.join(PACKAGES)}" if missing else None
    )


def can_install() -> bool:
    """Return True if this user can install the packages."""
    if os.geteuid() != 0 or shutil.which("apt-cache") is None:
        return False
    policy = subprocess.run(
        ["apt-cache", "policy", PACKAGES[0]], capture_output=True, text=True
    ).stdout
    return "Candidate:" in policy and "Candidate: (none)" not in policy


@dataclass
class Cluster:
    """A running Slurm cluster. Its methods run Slurm commands with its configuration."""

    folder: Path
    daemons: list[subprocess.Popen[bytes]]

    @property
    def scripts(self) -> Path:
        """The folder for the scripts of `titan slurm init`."""
        return self.folder / "scripts"

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> str:
        """Return the output of a command. Raise AssertionError with the output if it fails."""
        process = subprocess.run(
            command,
            env={**os.environ, **(env or {}), **self.env},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert process.returncode == 0, f"{command}: {process.stderr}{process.stdout}"
        return process.stdout

    def state(self, job: str) -> dict[str, str]:
        """Return scontrol's fields of a job or of an array task."""
        text = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(
            word.partition("=")[::2] for word in text.splitlines()[0].split() if "=" in word
        )

    def wait(self, *jobs: str, timeout: float = 100) -> list[dict[str, str]]:
        """Wait for the end of all jobs. Raise AssertionError with the logs after the timeout."""
        deadline = time.monotonic() + timeout
        while True:
            states = [self.state(job) for job in jobs]
            if all(
                s["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
                for s in states
            ):
                return states
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"{log}:\n{log.read_text()[-2000:]}" for log in self.folder.glob("*.log")
                )
                raise AssertionError(f"jobs still run after {timeout:g} s: {states}\n{logs}")
            time.sleep(0.2)

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        subprocess.run(
            ["scancel", "--signal=KILL", "--full", "--user=root"], env={**os.environ, **self.env}
        )
        subprocess.run(["scancel", "--user=root"], env={**os.environ, **self.env})
        deadline = time.monotonic() + 10
        while self.run("squeue", "--noheader").strip() and time.monotonic() < deadline:
            time.sleep(0.1)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()


def start(folder: Path) -> Cluster:
    """Start the daemons with their files in `folder`, and wait until all nodes accept jobs."""
    folder.chmod(0o755)  # munged requires a socket that other users can reach
    for name in ("munge", "state"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge/key"
    key.touch(mode=0o400)
    key.chmod(0o600)
    key.write_bytes(os.urandom(128))
    host = socket.gethostname().partition(".")[0]
    config = CONFIG.format(folder=folder, host=host, ports=free_ports(1 + len(NODES)), cpus=CPUS)
    (folder / "slurm.conf").write_text(config)
    munge = {name: f"--{name}={folder}/munge/{name.removesuffix('-file')}" for name in MUNGE_FILES}
    commands = [["munged", "--foreground", "--force", *munge.values()], ["slurmctld", "-D"]]
    commands += [["slurmd", "-D", "-N", name] for name in NODES]
    cluster = Cluster(folder, [])
    for command in commands:
        cluster.daemons.append(start_daemon(command, cluster.env, folder))
        if command[0] == "munged":
            wait_until(lambda: (folder / "munge/socket").exists(), "munged has no socket", folder)
    wait_until(lambda: has_idle_nodes(cluster), "the nodes accept no jobs", folder)
    return cluster


MUNGE_FILES = ("socket", "key-file", "pid-file", "log-file", "seed-file")


def start_daemon(
    command: list[str], env: Mapping[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    with open(folder / f"{command[0]}.output", "ab") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def has_idle_nodes(cluster: Cluster) -> bool:
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    process = subprocess.run(
        command, env={**os.environ, **cluster.env}, capture_output=True, text=True
    )
    return set(process.stdout.split()) == {"idle"}


def wait_until(condition, message: str, folder: Path, timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            output = "\n".join(
                f"{path}:\n{path.read_text()[-2000:]}" for path in folder.glob("*.output")
            )
            raise AssertionError(f"{message} after {timeout:g} s\n{output}")
        time.sleep(0.05)
