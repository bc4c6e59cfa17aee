"""Train the same weights in several replica groups, each of which may fail and return.

A group reads its own share of each step's samples: group g of n reads the g-th of n parts. It is
the only exception to the rule that one position describes all samples read (docs/guides/data.md):
a group that was away is behind, so each group has a position of its own. Every group knows the
positions of all groups *as of the weights*: they change with the update that uses the samples, and
a group that returns receives both. So no sample is lost or used twice, whoever fails when.

| class | when groups exchange |
| --- | --- |
| `ReplicaGroups` | gradients at every step |
| `SemiSyncGroups` | weights or weight differences every few steps (`semi_sync_method`) |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from torchtitan_like.distributed.quorum import Member, Quorum, SharedState

# Name of the state of all groups in the data state of a checkpoint.
GROUPS = "replica_groups"
_SYNC = 1 << 32  # more than the steps of a run


class GroupLostError(Exception):
    """A replica group was lost in a step. Raised on all ranks of each group that notices it."""


class GroupMismatch(Exception):
    """The replica groups of a checkpoint do not fit the ones of this run."""


class GroupPosition(NamedTuple):
    """The samples of one group that the weights have been trained on.

    position: of the stream, after them. digest_chain: of their batches.
    """

    position: int = 0
    digest_chain: int = 0


class GroupStep(NamedTuple):
    """What one group reads in a step, or the sum over groups.

    num_valid_tokens: labels. num_tokens: tokens. after: of this group, after the step.
    """

    num_valid_tokens: int
    num_tokens: int
    after: GroupPosition


class GroupProgress(NamedTuple):
    """What this group's weights have been trained on.

    n_tokens_seen: of all groups, as far as this one knows.
    """

    step: int
    n_tokens_seen: int
    position: GroupPosition


class Losses(NamedTuple):
    """The losses of one rank in a step, or their sums over the same rank of all groups.

    loss_share: 0-dim. loss_by_source: (sources,). num_labels, labels_by_source: what they cover.
    """

    loss_share: torch.Tensor
    loss_by_source: torch.Tensor
    num_labels: int
    labels_by_source: Sequence[int]

    def encode(self) -> torch.Tensor:
        """Return all values in one float64 vector on the CPU."""
        labels = torch.tensor([self.num_labels, *self.labels_by_source], dtype=torch.float64)
        losses = torch.cat([self.loss_share.detach().reshape(1), self.loss_by_source])
        return torch.cat([losses.to("cpu", torch.float64), labels])

    def decode(self, vector: torch.Tensor) -> Losses:
        """Return the values of another vector of `encode`, on the device of these."""
        num_sources = len(self.loss_by_source)
        losses, labels = vector.split(1 + num_sources)
        num_labels, *by_source = map(int, labels.tolist())
        losses = losses.to(self.loss_share.device)
        return Losses(losses[0], losses[1:], num_labels, by_source)


class ReplicaGroups:
    """The replica groups of a run with `[fault_tolerance]`. They exchange gradients.

    index, size: `replica_id` and `group_size`. identity: see `Member`. All methods are collectives
    of the group.
    """

    def __init__(
        self, index: int, size: int, quorum: Quorum, state: SharedState, identity: int
    ) -> None:
        self.index = index
        self.size = size
        self.positions = [GroupPosition()] * size
        self._quorum = quorum
        self._state = state
        self._identity = identity
        self._read: dict[int, GroupPosition] = {}  # after the step, of the groups that take part

    def join(self, trained: GroupProgress) -> int | None:
        """Wait for the other groups before a step, and receive their state if they are ahead.

        Returns the tokens that the weights have seen, or None if `trained` or the received state
        has the right number.
        """
        self._quorum.join(Member(self.index, trained.step, self._identity), self._state)
        return None

    def exchange(self, local: GroupStep) -> GroupStep:
        """Return the sums over the groups that take part in the step."""
        row = [self.index, local.num_valid_tokens, local.num_tokens, *_encode(local.after)]
        rows = self._quorum.gather(row)
        self._read = {index: _decode(*after) for index, _, _, *after in rows}
        return GroupStep(sum(row[1] for row in rows), sum(row[2] for row in rows), local.after)

    def reduce(self, gradients: Callable[[], list[torch.Tensor]], losses: Losses) -> Losses:
        """Sum gradients and losses over the groups.

        gradients: returns this rank's shards, which become the sums. Returns the sums of the
        losses. Raises GroupLostError if a group was lost. The gradients are then unchanged, and the
        step must not update the weights.
        """
        shards = gradients()
        *sums, loss_sums = self._quorum.sums([*shards, losses.encode()])
        if not self._quorum.succeeded():
            raise GroupLostError
        for shard, total in zip(shards, sums, strict=True):
            shard.copy_(total)
        for index, position in self._read.items():
            self.positions[index] = position
        return losses.decode(loss_sums)

    def finish_step(self, trained: GroupProgress) -> int | None:
        """Synchronize the weights after the update of a step, if that is due.

        Returns the tokens that the weights have seen, as `join` does.
        """
        return None

    def state_dict(self, local: GroupPosition) -> dict[str, Any]:
        """Return the entries to add to the data state. local: of this group, as of the weights."""
        positions = list(self.positions)
        positions[self.index] = local
        return {GROUPS: [position._asdict() for position in positions]}

    def load_state_dict(self, state: Mapping[str, Any]) -> GroupPosition | None:
        """Restore the entries; return the position of this group, None for the stream's position.

        state: a data state. Raises GroupMismatch if it has groups that have read other samples.
        """
        stored = state.get(GROUPS, ())
        if len(stored) == self.size:
            self.positions = [GroupPosition(**position) for position in stored]
            return self.positions[self.index]
        self.positions = [GroupPosition(common_position(state, self.size))] * self.size
        return None

    def close(self) -> None:
        """Leave the other groups."""
        self._quorum.close()


class Synchronizer(Protocol):
    """A method that synchronizes weights every few steps: see `optim.semi_sync`."""

    def is_due(self, step: int) -> bool:
        """Return True if groups exchange `values` after `step`."""
        ...

    def applies(self, step: int) -> bool:
        """Return True if the means of the last exchange change the weights after `step`."""
        ...

    def values(self, step: int) -> list[torch.Tensor]:
        """Return new tensors, of this rank's shards, that groups average after `step`."""
        ...

    def apply(self, step: int, means: list[torch.Tensor]) -> None:
        """Change the weights. means: over the groups, of the `values` of the last exchange."""
        ...


class SemiSyncGroups(ReplicaGroups):
    """Replica groups that train on their own between two synchronizations of their weights.

    The samples of a step count as read by the weights with the next synchronization. The group with
    most synchronizations, and then most steps, is ahead. A group that joins contributes nothing to
    the first synchronization.
    """

    def __init__(
        self,
        index: int,
        size: int,
        quorum: Quorum,
        state: SharedState,
        identity: int,
        synchronizer: Synchronizer,
    ) -> None:
        super().__init__(index, size, quorum, state, identity)
        self._synchronizer = synchronizer
        self._has_joined = False
        self._num_syncs = 0
        self._synced_tokens = 0  # that the weights had seen after the last synchronization
        self._means: list[torch.Tensor] | None = None

    def join(self, trained: GroupProgress) -> int | None:
        if self._has_joined:
            return None
        self._has_joined = True
        self._synced_tokens = trained.n_tokens_seen
        return self._synchronize(trained, contributes=False)

    def exchange(self, local: GroupStep) -> GroupStep:
        return local

    def reduce(self, gradients: Callable[[], list[torch.Tensor]], losses: Losses) -> Losses:
        return losses

    def finish_step(self, trained: GroupProgress) -> int | None:
        if self._synchronizer.is_due(trained.step):
            return self._synchronize(trained, contributes=True)
        self._apply(trained.step)
        return None

    def _synchronize(self, trained: GroupProgress, *, contributes: bool) -> int | None:
        """Join the other groups, and average the weights of all groups that contribute.

        Tries again without a group that is lost meanwhile. Returns the tokens that the weights have
        seen, or None if no group contributes.
        """
        step = trained.step
        while True:
            own = self._num_syncs * _SYNC + step
            newest = self._quorum.join(Member(self.index, own, self._identity), self._state)
            if newest != own:  # this group has received the state of another one
                contributes = False
                self._num_syncs, step = divmod(newest, _SYNC)
            num_tokens = trained.n_tokens_seen - self._synced_tokens
            tokens = (self._synced_tokens, num_tokens)
            row = [self.index, int(contributes), *tokens, *_encode(trained.position)]
            rows = [row for row in self._quorum.gather(row) if row[1]]
            sums: list[torch.Tensor] = []
            if rows:
                values = self._synchronizer.values(step)
                sums = self._quorum.sums(values if contributes else map(torch.zeros_like, values))
            if self._quorum.succeeded():
                break
        if not rows:
            return None
        self._means = [total / len(rows) for total in sums]
        for index, _, _, _, *position in rows:
            self.positions[index] = _decode(*position)
        self._num_syncs += 1
        self._synced_tokens = rows[0][2] + sum(row[3] for row in rows)
        self._apply(step)
        return self._synced_tokens

    def _apply(self, step: int) -> None:
        if self._means is not None and self._synchronizer.applies(step):
            self._synchronizer.apply(step, self._means)
            self._means = None


def common_position(state: Mapping[str, Any], size: int) -> int:
    """Return the position of a data state if all its groups have it. Raises GroupMismatch."""
    stored = [position["position"] for position in state.get(GROUPS, ())]
    if len(set(stored)) > 1:
        raise GroupMismatch(
            f"The checkpoint is of {len(stored)} replica groups that have read their samples up to "
            f"{', '.join(map(str, stored))}; this run has {size}. Expected the same number of "
            f"groups, because some have samples to read again: set fault_tolerance.group_size = "
            f'{len(stored)}, or start a new run from the weights (checkpoint.start = "warm", '
            "checkpoint.initial_load_path = the folder of the step)"
        )
    return int(stored[0]) if stored else int(state["position"])


def _encode(position: GroupPosition) -> tuple[int, int]:
    """Return two signed 64-bit numbers. The digest has 64 unsigned bits."""
    return position.position, position.digest_chain - (position.digest_chain >> 63 << 64)


def _decode(position: int, digest_chain: int) -> GroupPosition:
    return GroupPosition(position, digest_chain % (1 << 64))
