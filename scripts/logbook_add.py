"""Add an entry to a run's logbook: when, who, where the run was, and what has happened or was decided.

    python scripts/logbook_add.py logbook.md "loss spike at 61k; went back to 60,500" --run outputs
    echo "node-7 excluded: Xid 79" | python scripts/logbook_add.py logbook.md --run outputs

A new logbook begins as docs/guides/logbook_template.md, and grows at its end. Of --run, the run's folder,
the entry holds the step, loss and tokens, the attempt, and the git commit that it ran from. --dry-run prints
the entry. Exit code 2: the text is empty, or the folder is no run's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from scripts.compare_runs import environment_of
from scripts.notify import user_name
from scripts.watch import rows_of

TEMPLATE = Path(__file__).resolve().parents[1] / "docs/guides/logbook_template.md"


def where(run: Path) -> str:
    """Where a run is, in a line. ValueError when it has no attempt."""
    environment = environment_of(run)
    git = (environment / "git.txt").read_text(encoding="utf-8").splitlines()
    said = [
        f"attempt {environment.parent.name} of {run.resolve()}",
        *(line for line in git if line.startswith("commit ")),
    ]
    rows = rows_of(run / "metrics.jsonl")
    if rows:
        last = rows[-1]
        said.insert(0, f"step {last['step']:,}, loss {float(last['loss']):.4f}, {last['n_tokens_seen']:,} tokens")
    return "; ".join(said)


def entry(text: str, author: str, run: Path | None, now: float) -> str:
    """A section of the logbook, blank line first."""
    head = f"\n## {time.strftime('%Y-%m-%d %H:%M %z', time.localtime(now))}, {author}\n\n"
    return head + (f"*{where(run)}*\n\n" if run else "") + f"{text.strip()}\n"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logbook", type=Path, help="a Markdown file")
    parser.add_argument("text", nargs="?", help="default: standard input")
    parser.add_argument("--run", type=Path, help="the run's folder (job.dump_folder)")
    parser.add_argument("--author", default=user_name())
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(arguments)
    text = sys.stdin.read() if options.text is None else options.text
    try:
        if not text.strip():
            raise ValueError("the text is empty")
        added = entry(text, options.author, options.run, time.time())
        if options.dry_run:
            print(added, end="")
            return 0
        with open(options.logbook, "a+b") as file:  # at its end, whoever else writes
            if file.tell() == 0:
                file.write(TEMPLATE.read_bytes())
            file.write(added.encode())
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{options.logbook}: {added.splitlines()[1].removeprefix('## ')}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
