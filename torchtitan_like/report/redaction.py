"""Leave out what a report must not show to others: environment, paths, host names, log text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torchtitan_like.report.recorded import RecordedAttempt, RecordedRun, Warned

REDACTED = "(redacted)"
# Words in the names of settings and of keys of events whose values are paths, also without a slash.
PATH_WORDS = ("path", "folder", "file", "dir", "bundle", "host")


def redact(run: RecordedRun, name: str) -> RecordedRun:
    """Return a run without its environment, paths, host names and log text. name: its new name."""
    hosts = run.hosts()
    return replace(
        run,
        name=name,
        path=REDACTED,
        events=[_redact_fields(event, hosts) for event in run.events],
        validation=[_redact_fields(row, hosts) for row in run.validation],
        evals=[_redact_fields(row, hosts) for row in run.evals],
        attempts=[_redact_attempt(attempt, hosts) for attempt in run.attempts],
        checkpoints=[
            replace(
                checkpoint,
                name=f"step-{checkpoint.step}",
                state="complete" if checkpoint.state == "complete" else "damaged",
            )
            for checkpoint in run.checkpoints
        ],
        config=_redact_fields(run.config, hosts),
        state=replace(run.state, detail="", advice=""),
        problems=[REDACTED for _ in run.problems],
    )


def _redact_attempt(attempt: RecordedAttempt, hosts: set[str]) -> RecordedAttempt:
    error = attempt.error
    if error is not None:
        error = {key: error[key] for key in ("time", "rank", "phase", "step") if key in error}
    return replace(
        attempt,
        started=_redact_fields(attempt.started, hosts),
        config=_redact_fields(attempt.config, hosts),
        environment={},
        hosts=set(),
        error=error,
        warnings=[Warned(w.level, w.time, REDACTED, w.count) for w in attempt.warnings],
    )


def _redact_fields(row: dict[str, Any], hosts: Iterable[str]) -> dict[str, Any]:
    return {
        key: REDACTED if _names_path(key) and isinstance(value, str) else _redact(value, hosts)
        for key, value in row.items()
    }


def _redact(value: Any, hosts: Iterable[str]) -> Any:
    if isinstance(value, dict):
        return _redact_fields(value, hosts)
    if isinstance(value, list):
        return [_redact(item, hosts) for item in value]
    if isinstance(value, str) and ("/" in value or "\\" in value or any(h in value for h in hosts)):
        return REDACTED
    return value


def _names_path(key: str) -> bool:
    words = key.lower().rpartition(".")[2].split("_")
    return any(word in words for word in PATH_WORDS)
