"""Qwen3: the shared decoder with a norm on each head's queries and keys (arXiv:2505.09388)."""

from __future__ import annotations

from torchtitan_like.models.balance_rules import Balance
from torchtitan_like.models.layers.attention import NormedAttention
from torchtitan_like.models.layers.decoder import Decoder, DecoderBlock
from torchtitan_like.models.layers.feed_forward import FeedForward
from torchtitan_like.models.layers.kernels import attention_kernel
from torchtitan_like.models.layers.moe import Experts, MoE, Router
from torchtitan_like.models.layers.rotary import RotaryEmbedding
from torchtitan_like.models.qwen3.flavors import Qwen3Args


class Transformer(Decoder):
    """A Qwen3 model of the given sizes; see `Decoder` for inputs and outputs."""

    def __init__(self, args: Qwen3Args) -> None:
        rotary = RotaryEmbedding(args.head_dim, args.max_seq_len, args.rope_theta)
        core = attention_kernel(args.attn_type).core

        def build_block(layer: int) -> DecoderBlock:
            attention = NormedAttention(
                args.dim,
                args.n_heads,
                args.n_kv_heads,
                args.head_dim,
                rotary,
                core,
                args.norm_eps,
            )
            if args.num_experts == 0:
                return DecoderBlock(args, attention, FeedForward(args.dim, args.hidden_dim))
            return DecoderBlock(args, attention, moe=_build_moe(args))

        super().__init__(args, build_block)


def _build_moe(args: Qwen3Args) -> MoE:
    router = Router(
        args.dim,
        args.num_experts,
        args.top_k,
        score_func="softmax",
        normalize=args.route_norm,
        scale=1.0,
    )
    return MoE(
        router,
        Experts(args.num_experts, args.dim, args.moe_inter_dim),
        shared_experts=None,
        balance=Balance(args.load_balance, args.load_balance_coeff, args.router_z_coeff),
    )
