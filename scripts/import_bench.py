"""How long do imports take on this disk, cold and warm?

    python scripts/import_bench.py                                  # torch
    python scripts/import_bench.py torch torchtitan_like.train      # each by itself
    srun --nodes=8 --ntasks-per-node=1 --label python scripts/import_bench.py

Every rank reads thousands of small files before its first step: an environment on a slow shared disk takes minutes from each
start. A warm import is bound by the processor (about 2 s for torch); a cold one, of files that were dropped from this machine's
page cache, shows the disk. Of a local disk 5 s are usual, of NFS 20 s: then put the environment on a local disk, or into an
image. What the file server keeps in its own memory, and what another process has mapped, cannot be dropped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Prints the seconds that an import takes, and then every file that it has loaded, libraries too.
CHILD = """
import sys, time
begin = time.perf_counter()
__import__(sys.argv[1])
print(time.perf_counter() - begin)
modules = list(sys.modules.values())
files = {getattr(module, name, None) for module in modules for name in ("__file__", "__cached__")}
try:
    with open("/proc/self/maps") as maps:
        files |= {line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}
except OSError:
    pass
print(*sorted(file for file in files if isinstance(file, str)), sep="\\n")
"""


def timed_import(module: str) -> tuple[float, list[Path]]:
    """In a new process: the seconds, and the files that were read. ValueError when it cannot be imported."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", CHILD, module]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(f"{module} cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    seconds, *names = done.stdout.splitlines()
    return float(seconds), [Path(name) for name in names if os.path.isfile(name)]


def drop(files: list[Path]) -> int:
    """Ask the kernel to forget what it holds of these files; their bytes. Needs no rights but to read them."""
    num_bytes = 0
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        num_bytes += os.fstat(descriptor).st_size
        os.close(descriptor)
    return num_bytes


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=["torch"])
    try:
        for module in parser.parse_args(arguments).modules:
            files = timed_import(module)[1]
            num_bytes = drop(files)
            cold, warm = timed_import(module)[0], timed_import(module)[0]
            what = f"{len(files):,} files, {num_bytes / 2**20:,.0f} MiB"
            print(f"{module}: {cold:.2f} s cold, {warm:.2f} s warm ({what})", flush=True)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
