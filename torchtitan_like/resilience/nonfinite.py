"""Skip the updates of bad steps on the device, without making the host wait, or run them again.

`UpdateGate` decides from nothing but the global gradient norm, so all ranks decide alike. A
non-finite loss reaches every gradient and thereby the norm.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

from torchtitan_like.resilience.spikes import SpikeWindow
from torchtitan_like.util.exit_codes import ExitCode, RunFailure
from torchtitan_like.util.shards import local_shard

if TYPE_CHECKING:
    from torchtitan_like.config.sections_run import Resilience
    from torchtitan_like.distributed.world import HostGroup

logger = logging.getLogger()

Progress = TypeVar("Progress")
Input = TypeVar("Input")

HISTORY = 4  # steps kept on the host, which notices frozen and held updates two steps later
HIGH_NORM = 20.0  # a gradient norm that is this many times the median runs its step again
FEWEST_NORMS = 20  # of which a median is taken


class NonFiniteStateError(RunFailure):
    """The state to save holds an inf or nan, so no run can resume from it.

    names: of its tensors. path: of the state, which is saved for study.
    """

    exit_code = ExitCode.BAD_NUMBERS

    def __init__(self, step: int, names: Sequence[str], path: str | None) -> None:
        super().__init__(
            f"After step {step}, {len(names)} tensors of the run's state hold an inf or "
            f"nan: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}. Expected "
            f"finite numbers, so step {step} is not published. The state is in {path} for "
            "study; a restart uses the checkpoint before it. Check the learning rate and "
            "the machine's memory before you start again"
        )


def holds_high_norms(section: Resilience, *, has_experts: bool, is_atomic: bool) -> bool:
    """Return True if steps with a high norm run again. is_atomic: of the optimizer."""
    is_wanted = section.on_high_norm == "rerun"
    return is_wanted or (section.on_high_norm == "auto" and has_experts and is_atomic)


class HeldStep(NamedTuple):
    """A step that runs again.

    progress: before it. grad_norm: above `limit`, unless overflow (see `UpdateGate.gate`) is above 0.
    """

    progress: Any
    grad_norm: float
    limit: float
    overflow: float


@dataclass(frozen=True)
class _Step(Generic[Progress]):
    """Progress after a step, and the gate's values on their way to the host.

    norm, limit: of the gradient norm. overflow: see `UpdateGate.gate`. They stay on the device.
    """

    progress: Progress
    copy: PendingValues
    norm: torch.Tensor
    limit: torch.Tensor
    overflow: torch.Tensor

    @property
    def is_frozen(self) -> bool:
        return bool(self.copy.read()[0])

    @property
    def is_held(self) -> bool:
        return bool(self.copy.read()[1])

    @property
    def nonfinite_in_a_row(self) -> int:
        return int(self.copy.read()[2])


class PendingValues:
    """An asynchronous copy of 1-dim device values. It is complete one or two steps later."""

    def __init__(self, values: torch.Tensor) -> None:
        self._host = values
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[float]:
        """Block until the copy is complete and return the values."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._host.tolist()
        return values


class UpdateGate(Generic[Progress]):
    """Decides whether the update of a step is skipped, and when updates are frozen.

    | `resilience.on_nonfinite` | effect of non-finite steps |
    | --- | --- |
    | `stop` | the first one freezes all updates |
    | `skip` | skipped; more than `max_nonfinite_in_a_row` of them freeze all updates |

    Frozen updates keep the weights until the host notices, two steps later, and all ranks stop.
    With `on_spike = "skip"`, spikes of the norm are skipped as well. They never freeze updates.

    From `start_holding` on, a step can hold its update and those after it, until the host calls
    `release` and runs these steps again. A step does so that was not computed completely (`overflow`).
    With `holds_norms`, so does a finite norm above `HIGH_NORM` times the median of the last steps
    (above `resilience.first_high_norm` before there are `FEWEST_NORMS`).

    device: of the gradient norm. progress: before the first step. state: of `state_dict`, or empty.
    """

    def __init__(
        self,
        section: Resilience,
        device: torch.device,
        progress: Progress,
        state: Mapping[str, Any],
        *,
        holds_norms: bool = False,
    ) -> None:
        skips_nonfinite = section.on_nonfinite == "skip"
        skips_spikes = section.on_spike == "skip" and section.spike_threshold > 0
        self._most_in_a_row = section.max_nonfinite_in_a_row if skips_nonfinite else 0
        self._spike_threshold = section.spike_threshold if skips_spikes else 0.0
        self._norms: SpikeWindow | None = None
        if skips_spikes or holds_norms:
            self._norms = SpikeWindow(section.spike_window, device, state.get("grad_norms", ()))
        num_in_a_row = float(state.get("nonfinite_in_a_row", 0))
        self._nonfinite_in_a_row = torch.full((), num_in_a_row, device=device)
        self._is_frozen = self._is_held = torch.zeros((), device=device)
        self._holds_norms = holds_norms
        self._can_hold = False
        self._accepts_next = False
        self._first_limit = torch.full((), section.first_high_norm, device=device)
        self._norm = self._is_held
        self._limit = self._first_limit
        self._overflow = self._is_held
        self._history: deque[_Step[Progress]] = deque(maxlen=HISTORY)
        self.record(progress)

    def start_holding(self) -> None:
        """Hold updates where needed: the caller runs held steps again (`release`)."""
        self._can_hold = True

    def gate(
        self,
        grad_norm: torch.Tensor,
        *,
        has_labels: bool = True,
        overflow: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return 1 if this step's update is to be skipped, else 0. 0-dim tensors; does not wait.

        has_labels: False if no token of the step has a label on any rank. Its norm is no spike, and
            says nothing of the norms to come.
        overflow: above 0 if the step was not computed completely, see `RowExchange`. None: it was.
        """
        # The product is 0 or NaN. `isfinite` launches more kernels.
        is_nonfinite = (grad_norm * 0).ne(0)
        norm = grad_norm if has_labels else torch.full_like(grad_norm, torch.nan)
        nonfinite_in_a_row = (self._nonfinite_in_a_row + 1) * is_nonfinite
        if self._can_hold and (self._holds_norms or overflow is not None):
            self._hold(norm, is_nonfinite, overflow)
            nonfinite_in_a_row = nonfinite_in_a_row.where(
                self._is_held == 0, self._nonfinite_in_a_row
            )
        self._nonfinite_in_a_row = nonfinite_in_a_row
        self._is_frozen = torch.maximum(self._is_frozen, nonfinite_in_a_row > self._most_in_a_row)
        paused = torch.maximum(self._is_frozen, self._is_held)
        skip = torch.maximum(is_nonfinite, paused)
        if self._norms is not None:
            if self._spike_threshold:
                is_spike = (norm > self._norms.limit(self._spike_threshold)).float()
                skip = torch.maximum(skip, is_spike)
            self._norms.add(norm, unless=paused)
        return skip

    def _hold(
        self, norm: torch.Tensor, is_nonfinite: torch.Tensor, overflow: torch.Tensor | None
    ) -> None:
        """Hold updates from this step on if its norm is too high, or `overflow` is above 0.

        The norm of a step that runs again is accepted if it was too high before.
        """
        self._norm = norm
        if self._holds_norms:
            assert self._norms is not None
            self._limit = self._first_limit
            if self._norms.num_added >= FEWEST_NORMS:
                self._limit = HIGH_NORM * self._norms.median()
            if not self._accepts_next:
                is_high = (norm > self._limit) > torch.maximum(is_nonfinite, self._is_frozen)
                self._is_held = torch.maximum(self._is_held, is_high)
        if overflow is not None:
            # Waits only with CPU offload, where norms are on the host.
            self._overflow = overflow.to(norm.device)
            self._is_held = torch.maximum(self._is_held, (self._overflow > 0) > self._is_frozen)
        self._accepts_next = False

    def record(self, progress: Progress) -> None:
        """Record progress after the gated update."""
        if len(self._history) == HISTORY:
            self._history.popleft()  # frees its page-locked memory for the new copies
        values = torch.stack([self._is_frozen, self._is_held, self._nonfinite_in_a_row])
        copy = PendingValues(values)
        self._history.append(_Step(progress, copy, self._norm, self._limit, self._overflow))

    def was_frozen(self) -> bool:
        """Return True if updates were frozen two steps ago. Does not block."""
        return len(self._history) > 1 and self._history[-2].is_frozen

    def was_held(self) -> bool:
        """Return True if updates were held two steps ago. Does not block."""
        return len(self._history) > 1 and self._history[-2].is_held

    def is_held(self) -> bool:
        """Return True if the newest update was held. Waits for the device."""
        return self._can_hold and self._history[-1].is_held

    def release(self) -> HeldStep | None:
        """Forget the held steps, and return the first one; None if updates are not held.

        If its norm was too high, that of the next step is accepted. Waits for the device.
        """
        if not self.is_held():
            return None
        steps = list(self._history)
        good = [step for step in steps if not step.is_held]
        first = steps[len(good)]
        if self._norms is not None:
            self._norms.forget(len(steps) - len(good))
        self._history = deque(good, maxlen=HISTORY)
        self._is_held = torch.zeros_like(self._is_held)
        held = HeldStep(
            good[-1].progress, float(first.norm), float(first.limit), float(first.overflow)
        )
        # The norm of a step that was not computed completely says nothing of the next one.
        self._accepts_next = held.overflow == 0
        return held

    def last_good_progress(self) -> Progress | None:
        """Return the progress before updates were frozen, or None. Waits for the device."""
        good = self._good_steps()
        return None if len(good) == len(self._history) else good[-1].progress

    def state_dict(self) -> dict[str, Any]:
        """Return what later decisions depend on, as of the last good step. Waits for the device."""
        good = self._good_steps()
        state: dict[str, Any] = {"nonfinite_in_a_row": good[-1].nonfinite_in_a_row}
        if self._norms is not None:
            state["grad_norms"] = self._norms.tolist(len(self._history) - len(good))
        return state

    def _good_steps(self) -> list[_Step[Progress]]:
        """Return the steps of the history before updates were frozen."""
        return [step for step in self._history if not step.is_frozen]


def nonfinite_state(states: Mapping[str, Any], group: HostGroup) -> list[str]:
    """Return the names of tensors with an inf or nan on any rank. A collective.

    states: objects with a `state_dict`, by the prefix of their names.
    """
    named = (
        (f"{key}.{name}", value)
        for key, state in states.items()
        for name, value in state.state_dict().items()
        if isinstance(value, torch.Tensor)
    )
    local = nonfinite_names(named)
    if not any(group.sum_async([len(local)]).wait()):
        return []
    return sorted({name for names in group.gather_objects(local) for name in names})


@torch.no_grad()
def nonfinite_names(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of tensors with an inf or nan in this rank's shard. Waits for the device.

    A 2-norm is the cheapest pass over a tensor, but it may overflow. Only tensors with a non-finite
    norm are searched element by element.
    """
    groups: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
    for name, tensor in named:
        local = local_shard(tensor)
        if local.is_floating_point():
            groups.setdefault((local.device, local.dtype), {})[name] = local
    names = []
    for tensors in groups.values():
        norms = torch.stack(torch._foreach_norm(list(tensors.values())))
        are_finite = norms.isfinite().tolist()
        for (name, tensor), is_finite in zip(tensors.items(), are_finite, strict=True):
            if not is_finite and not tensor.isfinite().all():
                names.append(name)
    return names


# ---- steps that run again


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
            outcome = "spike" if second > held.limit else "wrong"
            if held.overflow:
                outcome = "overflow"
            else:
                logger.warning(
                    f"Step {row['step']} has run again. Its gradient norm was {first:.6g} and is "
                    f"{second:.6g}. "
                    + (
                        f"Both are above {held.limit:.4g}: it is a spike, and its update was made"
                        if outcome == "spike"
                        else "The first was wrong: a kernel, a GPU or its memory has failed. If it "
                        "happens again, look for the rank with resilience.verify_gradients_freq"
                    )
                )
            self._write_event(
                "rerun",
                step=row["step"],
                first=first,
                second=second,
                limit=held.limit,
                outcome=outcome,
            )
