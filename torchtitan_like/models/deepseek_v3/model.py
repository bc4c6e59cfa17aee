"""DeepSeek-V3: latent attention, dense and MoE layers (arXiv:2412.19437, section 2.1)."""

from __future__ import annotations

from typing import cast

from torchtitan_like.models.deepseek_v3.flavors import DeepSeekArgs, ScoreFunction
from torchtitan_like.models.layers.balance import Balance
from torchtitan_like.models.layers.decoder import DecoderBlock, FeedForward
from torchtitan_like.models.layers.kernels import Core, attention_kernel
from torchtitan_like.models.layers.latent_attention import LatentAttention
from torchtitan_like.models.layers.moe import Experts, MoE, Router
from torchtitan_like.models.layers.mtp import MTPBlock, MTPDecoder
from torchtitan_like.models.layers.rotary import RotaryEmbedding, Yarn


class Transformer(MTPDecoder):
    """A DeepSeek-V3 model of the given sizes; see `MTPDecoder` for inputs and outputs."""

    def __init__(self, args: DeepSeekArgs) -> None:
        yarn = None
        scale = 1.0
        if args.rope_factor != 1.0:
            yarn = Yarn(args.rope_factor, args.original_seq_len, args.beta_fast, args.beta_slow)
            scale = yarn.attention_scale(args.mscale)
        rotary = RotaryEmbedding(
            args.qk_rope_head_dim,
            args.max_seq_len,
            args.rope_theta,
            scaling=yarn,
            pairs="neighbors",
        )
        core = attention_kernel(args.attn_type).core

        def build_block(layer: int) -> DecoderBlock:
            attention = _build_attention(args, rotary, scale, core)
            if layer < args.n_dense_layers:
                return DecoderBlock(args, attention, FeedForward(args.dim, args.inter_dim))
            return DecoderBlock(args, attention, moe=_build_moe(args))

        def build_mtp_block(layer: int) -> MTPBlock:
            attention = _build_attention(args, rotary, scale, core)
            return MTPBlock(args, attention, moe=_build_moe(args))

        super().__init__(args, build_block, build_mtp_block)


def _build_attention(
    args: DeepSeekArgs, rotary: RotaryEmbedding, scale: float, core: Core
) -> LatentAttention:
    return LatentAttention(
        args.dim,
        args.n_heads,
        q_lora_rank=args.q_lora_rank,
        kv_lora_rank=args.kv_lora_rank,
        qk_nope_head_dim=args.qk_nope_head_dim,
        qk_rope_head_dim=args.qk_rope_head_dim,
        v_head_dim=args.v_head_dim,
        rotary=rotary,
        scale=scale,
        core=core,
    )


def _build_moe(args: DeepSeekArgs) -> MoE:
    router = Router(
        args.dim,
        args.num_experts,
        args.top_k,
        score_func=cast(ScoreFunction, args.score_func),
        normalize=args.route_norm,
        scale=args.route_scale,
        num_groups=args.num_expert_groups,
        num_limited_groups=args.num_limited_groups,
    )
    return MoE(
        router,
        Experts(args.num_experts, args.dim, args.moe_inter_dim),
        shared_experts=FeedForward(args.dim, args.num_shared_experts * args.moe_inter_dim),
        has_bias=args.score_func == "sigmoid",
        balance=Balance(
            args.load_balance,
            args.load_balance_coeff,
            args.router_z_coeff,
            args.sequence_loss_coeff,
        ),
    )
