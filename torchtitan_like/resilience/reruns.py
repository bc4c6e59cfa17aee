"""Run steps again whose updates `UpdateGate` holds because of a high gradient norm."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from torchtitan_like.resilience.nonfinite import HISTORY, HeldStep

logger = logging.getLogger()

Input = TypeVar("Input")


class Reruns(Generic[Input]):
    """Keeps the inputs of the newest steps, and reports what their second runs gave.

    write_event: (kind, **fields), to events.jsonl.
    """

    def __init__(self, write_event: Callable[..., None]) -> None:
        self._write_event = write_event
        self._newest: deque[Input] = deque(maxlen=HISTORY - 1)
        self._again: deque[Input] = deque()
        self._held: dict[int, HeldStep] = {}

    def keep(self, inputs: Input) -> None:
        """Keep the inputs of a step that has been launched."""
        self._newest.append(inputs)

    def repeat(self, held: HeldStep, num_steps: int, upcoming: Input) -> None:
        """Let `next_input` return the inputs of the last `num_steps` steps, and `upcoming`."""
        self._again.extendleft([upcoming, *list(self._newest)[::-1][:num_steps]])
        self._newest.clear()
        self._held[held.progress.step + 1] = held

    def next_input(self) -> Input | None:
        """Return the inputs of the next step if they are known."""
        return self._again.popleft() if self._again else None

    def observe(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Report the second norms of steps that have run again. On rank 0."""
        for row in rows:
            held = self._held.pop(row["step"], None)
            if held is None:
                continue
            first, second = held.grad_norm, row["grad_norm"]
            is_spike = second > held.limit
            logger.warning(
                f"Step {row['step']} has run again. Its gradient norm was {first:.6g} and is "
                f"{second:.6g}. "
                + (
                    f"Both are above {held.limit:.4g}: it is a spike, and its update was made"
                    if is_spike
                    else "The first was wrong: a kernel, a GPU or its memory has failed. If it happens "
                    "again, look for the rank with resilience.verify_gradients_freq"
                )
            )
            self._write_event(
                "rerun",
                step=row["step"],
                first=first,
                second=second,
                limit=held.limit,
                outcome="spike" if is_spike else "wrong",
            )
