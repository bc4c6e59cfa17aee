"""Which nodes of an allocation must be left out? Prints a line that sbatch takes: --exclude=node-7,node-12

    salloc --nodes=16 --gpus-per-node=8 --exclusive python scripts/slurm/find_bad_nodes.py --gpus 8
    python scripts/slurm/find_bad_nodes.py --hosts 'node-[1-16]'       # in an allocation that holds them

First every node looks at itself (titan node check), all at once. Then those that are well all-reduce in pairs; when a
pair fails, each of the two is tried again with a node of a pair that did not. A node that has not answered in --timeout
seconds is bad. Exit code 0: none is bad; 1: the line has been printed; 2: no answer, for example as every pair fails.
Options that follow `--` go to srun. --dry-run prints the commands of the first round.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECK = ("-m", "torchtitan_like", "node", "check")
# Runs a command with variables added: has it returned 0 in time?, and what it said.
Runner = Callable[[Sequence[str], dict[str, str]], tuple[bool, str]]


def runner(timeout: float) -> Runner:
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}

    def run(command: Sequence[str], env: dict[str, str]) -> tuple[bool, str]:
        try:
            done = subprocess.run(command, env={**os.environ, **path, **env}, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return False, f"no answer within {timeout:g} s"
        # srun adds a line to stderr that only repeats the exit code.
        return done.returncode == 0, done.stdout.strip() or done.stderr.strip()

    return run


def srun(hosts: Sequence[str], words: Sequence[str], options: Sequence[str]) -> list[str]:
    """One task on each of ``hosts``, whatever else the allocation does."""
    count = str(len(hosts))
    command = ["srun", "--overlap", f"--nodelist={','.join(hosts)}", f"--nodes={count}", f"--ntasks={count}"]
    return [*command, "--ntasks-per-node=1", *options, sys.executable, *CHECK, *words]


def alone(hosts: Sequence[str], run: Runner, words: Sequence[str], options: Sequence[str]) -> dict[str, str]:
    """The hosts that say of themselves, or cannot say, that they are well: host -> what was said."""
    with ThreadPoolExecutor(32) as pool:
        answers = pool.map(lambda host: run(srun([host], words, options), {}), hosts)
        return {host: said for host, (is_well, said) in zip(hosts, answers, strict=True) if not is_well}


def reach(pairs: Sequence[tuple[str, str]], run: Runner, options: Sequence[str], first_port: int) -> list[bool]:
    """Do the two of each pair reach each other? All pairs at once, each at a port of its own."""

    def try_pair(number: int) -> bool:
        pair = pairs[number]
        env = {"MASTER_ADDR": pair[0], "MASTER_PORT": str(first_port + number)}
        return run(srun(pair, ["--ranks"], options), env)[0]

    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(try_pair, range(len(pairs))))


def unreachable(hosts: Sequence[str], run: Runner, options: Sequence[str]) -> list[str]:
    """The hosts that others do not reach. ValueError when every pair fails: then it is not the fault of some."""
    if len(hosts) < 2:
        return []
    pairs = [(a, b) for a, b in zip(hosts[::2], hosts[1::2], strict=False)]
    if len(hosts) % 2:
        pairs.append((hosts[0], hosts[-1]))
    well = dict(zip(pairs, reach(pairs, run, options, 29_600), strict=True))
    if not any(well.values()):
        raise ValueError(f"no pair of nodes reaches each other: {pairs}")
    known = {host for pair, is_well in well.items() if is_well for host in pair}
    partner = sorted(known)[0]
    suspects = sorted({host for pair, is_well in well.items() if not is_well for host in pair} - known)
    # One after the other: the partner is the same.
    return [suspect for suspect in suspects if not reach([(partner, suspect)], run, options, 29_900)[0]]


def hosts_of(text: str | None) -> list[str]:
    command = [str(ROOT / "scripts/slurm/hosts.sh"), *([text] if text else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(f"which nodes? In an allocation, or with --hosts: {done.stderr.strip()}")
    return done.stdout.split()


def main(arguments: list[str], run: Runner | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", metavar="LIST", help="default: those of this job")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many each node must have")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="for the answer of a node")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("srun", nargs="*", help="options for srun, after --")
    options = parser.parse_args(arguments)
    words = [] if options.gpus is None else ["--gpus", str(options.gpus)]
    run = run or runner(options.timeout)
    try:
        hosts = hosts_of(options.hosts)
        if options.dry_run:
            print("\n".join(shlex.join(srun([host], words, options.srun)) for host in hosts))
            return 0
        bad = alone(hosts, run, words, options.srun)
        for host, said in bad.items():
            print(f"{host}: {said.splitlines()[-1] if said else 'no word'}")
        silent = unreachable([host for host in hosts if host not in bad], run, options.srun)
        for host in silent:
            print(f"{host}: is not reached by others")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    excluded = sorted([*bad, *silent])
    print(f"--exclude={','.join(excluded)}" if excluded else f"all {len(hosts)} nodes are well")
    return 1 if excluded else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
