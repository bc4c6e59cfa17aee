"""Train one replica group of several (`[fault_tolerance]`): see distributed/replica_groups.py."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import xxhash

from torchtitan_like.checkpoint.stateful import Progress, Stateful
from torchtitan_like.config.sections_run import LIGHTHOUSE
from torchtitan_like.distributed.quorum import Quorum, SharedState
from torchtitan_like.distributed.replica_groups import (
    GroupPosition,
    GroupProgress,
    GroupStep,
    Losses,
    ReplicaGroups,
    SemiSyncGroups,
)
from torchtitan_like.distributed.stages import model_fragments
from torchtitan_like.monitor.log import logger
from torchtitan_like.optim.semi_sync import Method, build_semi_sync
from torchtitan_like.resilience.agreement import StepAgreement
from torchtitan_like.resolved import RankRun
from torchtitan_like.train import StepInput, Trainer
from torchtitan_like.util.shards import local_shard


class GroupTrainer(Trainer):
    """A trainer whose steps are shared with other replica groups, which may fail and return."""

    groups: ReplicaGroups
    method: Method | None = None  # synchronizes weights every few steps; None: gradients at each

    def __init__(self, run: RankRun) -> None:
        super().__init__(run)
        if self.method is not None and self.origin.start.kind != "resume":
            self.method.reset()

    def close(self) -> None:
        """Leave the other groups, and release files and threads."""
        self.groups.close()
        super().close()

    # ---- start

    def _connect_groups(self) -> None:
        section = self.config.fault_tolerance
        if section.semi_sync_method is not None:
            fragments = model_fragments(section, self.run.spec, self.run.args)
            self.method = build_semi_sync(self.optim.optimizer.named, section, fragments)
        quorum = Quorum(
            os.environ[LIGHTHOUSE],
            f"torchtitan_ft_{section.replica_id}",
            self.world.step_group,
            min_size=section.min_replica_size,
            timeout=timedelta(milliseconds=section.process_group_timeout_ms),
            patience=timedelta(seconds=self.config.comm.init_timeout_seconds),
        )
        shared = SharedState(self._shared_tensors, self._shared_text, self._restore_shared)
        arguments = (section.replica_id, section.group_size, quorum, shared, self._identity())
        if self.method is None:
            self.groups = ReplicaGroups(*arguments)
        else:
            self.groups = SemiSyncGroups(*arguments, self.method)

    def _identity(self) -> int:
        """Return a digest of the settings that all replica groups must share."""
        sections = self.config.model_dump(
            include={"optimizer", "ema", "lr_scheduler", "loss", "fault_tolerance"}
        )
        del sections["fault_tolerance"]["replica_id"]
        training = self.config.training
        shared = [
            self.run.seed,
            self.batches.fingerprint,
            asdict(self.run.geometry),
            repr(self.run.args),
            [training.steps, training.max_norm, training.seq_len],
            sections,
            repr(self.config.extra_sections),
        ]
        return xxhash.xxh3_64_intdigest(json.dumps(shared, sort_keys=True).encode()) >> 1

    def _states(self) -> dict[str, Stateful]:
        states = super()._states()
        return states if self.method is None else {**states, "fault_tolerance": self.method}

    def _data_state(self) -> dict[str, Any]:
        return {**super()._data_state(), **self.groups.state_dict(self._trained().position)}

    def _restore_groups(self, state: dict[str, Any]) -> None:
        local = self.groups.load_state_dict(state)
        if local is not None:  # another group may have saved the state
            self.batches.seek(local.position)

    # ---- step

    def _join_groups(
        self, inputs: StepInput, agreement: StepAgreement
    ) -> tuple[StepInput, StepAgreement]:
        """Join the other replica groups before a step.

        If this group must read other samples than `inputs`, returns these and their agreement:
        after a step that was not committed, or if it received the state of another group.
        """
        self.position.move("join", self.progress.step)
        self._count_tokens(self.groups.join(self._trained()))
        self.position.move("step", self.progress.step)  # a rank that hangs from here on is reported
        if not self._must_read_again(inputs):
            return inputs, agreement
        self.batches.seek(self.progress.position)
        inputs = self.fetch(self.progress.step + 1)
        agreement = inputs.agreement.wait()
        for request in agreement.requests:  # for the next step: other groups wait for this one
            self.requests.add(request)
        return inputs, agreement

    def _exchange(self, local: GroupStep) -> GroupStep:
        return self.groups.exchange(local)

    def _reduce(self, losses: Losses) -> Losses:
        return self.groups.reduce(self.optim.optimizer.local_gradients, losses)

    def _finish_group_step(self) -> None:
        self._count_tokens(self.groups.finish_step(self._trained()))

    def _trained(self) -> GroupProgress:
        """Return what the weights of this replica group have been trained on."""
        progress = self.progress
        position = GroupPosition(progress.position, progress.digest_chain)
        return GroupProgress(progress.step, progress.n_tokens_seen, position)

    def _count_tokens(self, n_tokens_seen: int | None) -> None:
        """Take over the number of tokens that replica groups have agreed on, if they have."""
        if n_tokens_seen is not None:
            self.progress = replace(self.progress, n_tokens_seen=n_tokens_seen)
            self.metrics.n_tokens_seen = n_tokens_seen

    # ---- the state that a group receives when it returns

    def _shared_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's shards of the state that is equal in all replica groups."""
        self.checkpointer.order_updates()  # they may receive new values
        return {
            f"{key}.{name}": local_shard(value)
            for key, state in self.states.items()
            for name, value in state.state_dict().items()
            if isinstance(value, torch.Tensor)
        }

    def _shared_text(self) -> str:
        trained = self._trained()
        return json.dumps(
            {
                "step": trained.step,
                "n_tokens_seen": trained.n_tokens_seen,
                "numbers": self.guard.update_gate.state_dict(),
                **self.groups.state_dict(trained.position),
            }
        )

    def _restore_shared(self, text: str) -> None:
        """Continue from the state of another replica group. The tensors are in place."""
        state = json.loads(text)
        position = self.groups.load_state_dict(state)
        assert position is not None
        self.progress = Progress(state["step"], state["n_tokens_seen"], *position)
        self.guard.restore(self.progress, state["numbers"])
        self.metrics.n_tokens_seen = self.progress.n_tokens_seen
        self.optim.refresh()
        logger.info(
            f"Received the state after step {self.progress.step} from another replica group. This "
            f"group continues at sample {self.progress.position:,}"
        )
