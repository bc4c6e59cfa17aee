"""Write run directories with known numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SCRIPT = "</script><script>document.title='attacked'</script><b>"


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def step_row(step: int, time: float, **values: Any) -> Row:
    return {
        "step": step,
        "n_tokens_seen": 64 * step,
        "loss": 8.0 - 0.01 * step,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "skipped": 0,
        "time": time,
        **values,
    }


def event(kind: str, time: float, attempt: int = 1, **values: Any) -> Row:
    return {"event": kind, "time": time, "attempt": attempt, **values}


def start_event(attempt: int, began: float, num_ranks: int = 1) -> Row:
    return event(
        "start", began + 4, attempt, step=0, source="scratch", began=began, num_ranks=num_ranks
    )


def write_steady_run(run: Path, num_steps: int = 20) -> Path:
    """A run of one attempt: it starts at 1000 s, and step n ends at 1010 + 2 n seconds."""
    write_rows(
        run / "metrics.jsonl", (step_row(n, 1010.0 + 2 * n) for n in range(1, num_steps + 1))
    )
    end = 1011.0 + 2 * num_steps
    stop = event("stop", end, reason="done", cause="last_step", code=0, step=num_steps)
    write_rows(run / "events.jsonl", [start_event(1, 1000.0), stop])
    (run / "config.toml").write_text(f"[model]\nname = 'llama3'\n[training]\nsteps = {num_steps}\n")
    return run


def write_killed_run(run: Path) -> Path:
    """A run that was killed in attempt 1, hung in attempt 2, and ended in attempt 3.

    Attempts 2 and 3 resume at step 3. The steps of attempt 3 take 2 s, except step 8 (22 s).
    Step 5 of attempt 3 is skipped. A validation of 5 s follows its step 6.
    """
    kept = [
        *(step_row(n, 108.0 + 2 * n) for n in (1, 2, 3)),
        step_row(4, 186.0),
        step_row(5, 188.0, skipped=1, loss="nan"),
        step_row(6, 190.0),
        step_row(7, 197.0),
        step_row(8, 219.0),
    ]
    write_rows(run / "metrics.jsonl", kept)
    write_rows(run / "metrics.discarded-2.jsonl", [step_row(4, 117.0), step_row(5, 119.0)])
    write_rows(
        run / "metrics.discarded-3.jsonl",
        [step_row(4, 136.0), step_row(5, 138.0), step_row(6, 140.0)],
    )
    write_rows(
        run / "validation.jsonl",
        [{"step": 6, "n_tokens_seen": 384, "loss": 7.5, "seconds": 5.0, "time": 195.0}],
    )
    save = event("save", 115.0, step=3, path="checkpoint/step-3", form="full", seconds=1.0)
    stop = event("stop", 220.0, 3, reason="done", cause="last_step", code=0, step=8)
    starts = [start_event(1, 100.0), start_event(2, 130.0), start_event(3, 180.0, num_ranks=2)]
    write_rows(run / "events.jsonl", [starts[0], save, *starts[1:], stop])
    for attempt, last_sign in ((1, 120.5), (2, 140.0), (3, 220.0)):
        folder = run / f"attempts/{attempt}"
        beat = {"phase": "step", "step": 5, "micro_batch": 0, "time": last_sign, "host": "node17"}
        write_rows(folder / "heartbeat/rank-0.json", [beat])
        (folder / "config.toml").write_text(
            f"[optimizer]\nlr = {'6e-4' if attempt == 3 else '8e-4'}\n"
        )
    error = {
        "time": 170.0,
        "host": "node17",
        "gpu": None,
        "rank": 1,
        "phase": "step",
        "step": 7,
        "traceback": f"Traceback\n  /home/me/secret.py\nRuntimeError: {SCRIPT}",
    }
    for name in ("rank-1.json", "first.json"):
        write_rows(run / "attempts/2/errors" / name, [error])
    (run / "config.toml").write_text("[optimizer]\nlr = 6e-4\n")
    write_rows(run / "exit.json", [{"reason": "done", "code": 0, "step": 8}])
    return run
