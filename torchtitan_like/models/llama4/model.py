"""Llama 4 without vision: layers with and without rotation, and experts in some layers."""

from __future__ import annotations

from torchtitan_like.models.layers.attention import Attention
from torchtitan_like.models.layers.balance import Balance
from torchtitan_like.models.layers.decoder import Decoder, DecoderBlock, FeedForward
from torchtitan_like.models.layers.kernels import Core, attention_kernel
from torchtitan_like.models.layers.local_attention import (
    RotatedAttention,
    UnrotatedAttention,
    local_core,
)
from torchtitan_like.models.layers.moe import InputWeightedExperts, MoE, Router
from torchtitan_like.models.layers.rotary import Llama3, RotaryEmbedding
from torchtitan_like.models.llama4.flavors import Llama4Args


class Transformer(Decoder):
    """A Llama 4 text model of the given sizes; see `Decoder` for inputs and outputs."""

    def __init__(self, args: Llama4Args) -> None:
        scaling = Llama3(
            args.rope_scaling_factor,
            args.rope_low_freq_factor,
            args.rope_high_freq_factor,
            args.rope_original_max_seq_len,
        )
        rotary = RotaryEmbedding(
            args.head_dim, args.max_seq_len, args.rope_theta, scaling=scaling, pairs="neighbors"
        )
        kernel = attention_kernel(args.attn_type)
        # Layers of a kind share a function, so that they share a compilation.
        cores = {
            chunk: local_core(kernel.core, is_local=chunk > 0) for chunk in (0, args.chunk_size)
        }

        def build_block(layer: int) -> DecoderBlock:
            attention = _build_attention(args, layer, rotary, cores[args.chunk(layer)])
            if args.has_experts(layer):
                return DecoderBlock(args, attention, moe=_build_moe(args))
            return DecoderBlock(args, attention, FeedForward(args.dim, args.ffn_dim))

        super().__init__(args, build_block)
        self.use_local_masks(kernel, args.max_seq_len, chunk=args.chunk_size)


def _build_attention(
    args: Llama4Args, layer: int, rotary: RotaryEmbedding, core: Core
) -> Attention:
    arguments = (args.dim, args.n_heads, args.num_kv_heads, args.head_dim, rotary, core)
    if not args.is_rotated(layer):
        # At positions below floor_scale - 1, all factors are 1.
        attn_scale = args.attn_scale if args.max_seq_len >= args.floor_scale else 0.0
        return UnrotatedAttention(*arguments, attn_scale=attn_scale, floor_scale=args.floor_scale)
    if args.use_qk_norm:
        return RotatedAttention(*arguments, norm_eps=args.norm_eps)
    return Attention(*arguments)


def _build_moe(args: Llama4Args) -> MoE:
    router = Router(
        args.dim, args.num_experts, args.top_k, score_func="sigmoid", normalize=False, scale=1.0
    )
    return MoE(
        router,
        InputWeightedExperts(args.num_experts, args.dim, args.moe_inter_dim),
        shared_experts=FeedForward(args.dim, args.moe_inter_dim),
        balance=Balance(args.load_balance, args.load_balance_coeff, args.router_z_coeff),
    )
