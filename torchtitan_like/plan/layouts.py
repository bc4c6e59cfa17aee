"""Inputs of a plan: the sizes of a model, a cluster, and one layout of the ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchtitan_like.models.llama3.flavors import FLAVORS, num_params

GB = 1e9
# GB/s of a machine with 8 GPUs, per direction. Collectives reach 80 % of it.
# Within the machine: NVLink 4 of an H100, 450 for each GPU.
# Between machines: one 400 Gbit/s card for each GPU, or 100 Gbit/s Ethernet for all of them.
REACHED = 0.8
NVLINK = 450.0
NETS = {"fast": 8 * 50.0, "slow": 12.5}


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder like Llama 3."""

    params: float
    layers: int
    dim: int
    ffn_dim: int
    heads: int
    kv_heads: int
    vocab: int
    is_tied: bool
    name: str

    @property
    def embedding(self) -> int:
        """Parameters of the embedding. The head has as many."""
        return self.vocab * self.dim

    @property
    def block(self) -> float:
        """Parameters of one layer."""
        return (self.params - (1 if self.is_tied else 2) * self.embedding) / self.layers

    @property
    def kv_dim(self) -> int:
        """Width of all keys of a token."""
        return self.kv_heads * self.dim // self.heads


def model_of(params: float) -> Model:
    """Return the sizes of the Llama 3 with about `params` parameters.

    If no Llama 3 is within 10 %, estimates a model whose width is 128 times its number of layers,
    like the 8B model.
    """
    name, args = min(FLAVORS.items(), key=lambda item: abs(math.log(num_params(item[1]) / params)))
    if abs(num_params(args) / params - 1) < 0.1:
        return Model(
            num_params(args),
            args.n_layers,
            args.dim,
            args.ffn_dim,
            args.n_heads,
            args.num_kv_heads,
            args.vocab_size,
            args.enable_weight_tying,
            f"Llama 3 {name}",
        )
    layers = max(1, round((params / (13 * 128**2)) ** (1 / 3)))
    dim = 128 * layers
    return Model(
        params,
        layers,
        dim,
        ffn_dim=round(3.5 * dim),
        heads=layers,
        kv_heads=math.gcd(layers, 8),
        vocab=128256,
        is_tied=False,
        name="estimated sizes",
    )


@dataclass(frozen=True)
class Cluster:
    """Machines with GPUs.

    gpus: of all nodes. gpu_gib: memory of a GPU, GiB. node_gbs: GB/s from a node to the others.
    flops: FLOP/s that a GPU reaches. host_gib: main memory of a node, GiB.
    """

    gpus: int
    nodes: int
    gpu_gib: float
    node_gbs: float
    flops: float
    host_gib: float = 1024

    @property
    def per_node(self) -> int:
        """GPUs of a node."""
        return self.gpus // self.nodes

    def bandwidth(self, members: int, stride: int) -> float:
        """Return the bytes/s at which each rank of a group sends; its ranks are `stride` apart.

        All groups of a node share its network: a group with k ranks on a node of n has k/n of it.
        """
        inside = NVLINK * REACHED * GB
        if members * stride <= self.per_node:
            return inside
        members_on_node = max(1, self.per_node // stride)
        return min(inside, self.node_gbs * REACHED * GB * members_on_node / self.per_node)


@dataclass(frozen=True)
class Plan:
    """One layout. micro: samples of one forward pass; recompute: activation_checkpoint.mode."""

    pp: int
    replicate: int
    shard: int
    cp: int
    tp: int
    micro: int
    recompute: str
    offload: bool = False

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.replicate * self.shard

    @property
    def name(self) -> str:
        """The layout as users call it, such as TP 2 x FSDP 8."""
        degrees = (("PP", self.pp), ("CP", self.cp), ("TP", self.tp))
        kinds = [f"{kind} {degree}" for kind, degree in degrees if degree > 1]
        if self.replicate > 1 and self.shard > 1:
            kinds.append(f"HSDP {self.replicate} x {self.shard}")
        elif self.dp > 1:
            kinds.append(f"FSDP {self.shard}" if self.shard > 1 else f"DDP {self.replicate}")
        return (" x ".join(kinds) or "one GPU") + " + CPU offload" * self.offload
