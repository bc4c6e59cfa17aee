"""Find the bad nodes of an allocation. Prints an option for sbatch: --exclude=node-7,node-12

    salloc --nodes=16 --gpus-per-node=8 --exclusive python DIR/find_bad_nodes.py --gpus 8
    python DIR/find_bad_nodes.py --hosts 'node-[1-16]'       # in an allocation that holds them

First, all nodes check themselves in parallel (titan node check). Then the good nodes all-reduce in
pairs. If a pair fails, each of its nodes is tried again with a node of a good pair. A node that
does not answer in --timeout seconds is bad. Options after `--` go to srun. --dry-run prints the
commands of the first round.

Returns 0 if no node is bad, and 1 if it has printed the option. Returns 2 if the result is
ambiguous, for example if every pair fails.
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

FOLDER = Path(__file__).resolve().parent
CHECK = ("titan", "node", "check")
# Runs a command with more variables. Returns whether it succeeded in time, and its output.
Runner = Callable[[Sequence[str], dict[str, str]], tuple[bool, str]]


def runner(timeout: float) -> Runner:
    def run(command: Sequence[str], env: dict[str, str]) -> tuple[bool, str]:
        try:
            done = subprocess.run(
                command, env={**os.environ, **env}, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return False, f"no answer within {timeout:g} s"
        # srun adds a line to stderr that only repeats the exit code.
        return done.returncode == 0, done.stdout.strip() or done.stderr.strip()

    return run


def srun(hosts: Sequence[str], words: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the command of one task on each of `hosts`, next to other steps of the allocation."""
    count = str(len(hosts))
    command = [
        "srun",
        "--overlap",
        f"--nodelist={','.join(hosts)}",
        f"--nodes={count}",
        f"--ntasks={count}",
    ]
    return [*command, "--ntasks-per-node=1", *options, *CHECK, *words]


def check_alone(
    hosts: Sequence[str], run: Runner, words: Sequence[str], options: Sequence[str]
) -> dict[str, str]:
    """Let each host check itself. Returns the bad ones: host -> output."""
    with ThreadPoolExecutor(32) as pool:
        answers = pool.map(lambda host: run(srun([host], words, options), {}), hosts)
        return {
            host: text for host, (is_good, text) in zip(hosts, answers, strict=True) if not is_good
        }


def check_pairs(
    pairs: Sequence[tuple[str, str]], run: Runner, options: Sequence[str], first_port: int
) -> list[bool]:
    """Return whether the hosts of each pair reach each other. All run in parallel, on different ports."""

    def try_pair(number: int) -> bool:
        pair = pairs[number]
        env = {"MASTER_ADDR": pair[0], "MASTER_PORT": str(first_port + number)}
        return run(srun(pair, ["--ranks"], options), env)[0]

    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(try_pair, range(len(pairs))))


def unreachable(hosts: Sequence[str], run: Runner, options: Sequence[str]) -> list[str]:
    """Return the hosts that others do not reach. Raises ValueError if every pair fails."""
    if len(hosts) < 2:
        return []
    pairs = [(a, b) for a, b in zip(hosts[::2], hosts[1::2], strict=False)]
    if len(hosts) % 2:
        pairs.append((hosts[0], hosts[-1]))
    is_good = dict(zip(pairs, check_pairs(pairs, run, options, 29_600), strict=True))
    if not any(is_good.values()):
        raise ValueError(
            f"No pair of nodes reaches each other: {pairs}. Expected at least one. Check the "
            "network, or test other nodes."
        )
    good_hosts = {host for pair, good in is_good.items() if good for host in pair}
    partner = sorted(good_hosts)[0]
    suspects = sorted(
        {host for pair, good in is_good.items() if not good for host in pair} - good_hosts
    )
    # In sequence, because all use the same partner.
    return [
        suspect
        for suspect in suspects
        if not check_pairs([(partner, suspect)], run, options, 29_900)[0]
    ]


def expand_hosts(text: str | None) -> list[str]:
    command = [str(FOLDER / "hosts.sh"), *([text] if text else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(
            f"No nodes are given: {done.stderr.strip()}. Expected names of nodes. Use --hosts, or run "
            "in an allocation."
        )
    return done.stdout.split()


def main(arguments: list[str], run: Runner | None = None) -> int:
    """Find the bad nodes. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", metavar="LIST", help="default: the hosts of this job")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many each node must have")
    parser.add_argument(
        "--timeout", type=float, default=300, metavar="SECONDS", help="for the answer of a node"
    )
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("srun", nargs="*", help="options for srun, after --")
    options = parser.parse_args(arguments)
    words = [] if options.gpus is None else ["--gpus", str(options.gpus)]
    run = run or runner(options.timeout)
    try:
        hosts = expand_hosts(options.hosts)
        if options.dry_run:
            print("\n".join(shlex.join(srun([host], words, options.srun)) for host in hosts))
            return 0
        bad = check_alone(hosts, run, words, options.srun)
        for host, text in bad.items():
            print(f"{host}: {text.splitlines()[-1] if text else 'no output'}")
        isolated = unreachable([host for host in hosts if host not in bad], run, options.srun)
        for host in isolated:
            print(f"{host}: other nodes do not reach it")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    excluded = sorted([*bad, *isolated])
    print(f"--exclude={','.join(excluded)}" if excluded else f"all {len(hosts)} nodes are good")
    return 1 if excluded else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
