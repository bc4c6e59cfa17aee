"""gpt-oss: attention with sinks and windows, and experts in every block (arXiv:2508.10925)."""

from __future__ import annotations

from torchtitan_like.models.gpt_oss.flavors import GptOssArgs
from torchtitan_like.models.layers.balance import Balance
from torchtitan_like.models.layers.decoder import Decoder, DecoderBlock
from torchtitan_like.models.layers.kernels import attention_kernel
from torchtitan_like.models.layers.local_attention import SinkAttention, local_core
from torchtitan_like.models.layers.moe import BiasedExperts, MoE, Router
from torchtitan_like.models.layers.rotary import RotaryEmbedding, Yarn


class Transformer(Decoder):
    """A gpt-oss model of the given sizes; see `Decoder` for inputs and outputs."""

    def __init__(self, args: GptOssArgs) -> None:
        rotary = _build_rotary(args)
        kernel = attention_kernel(args.attn_type)
        # Layers of a kind share a function, so that they share a compilation.
        cores = {
            window: local_core(kernel.core, is_local=window > 0, sink_index=args.head_dim)
            for window in {args.window(layer) for layer in range(args.n_layers)}
        }

        def build_block(layer: int) -> DecoderBlock:
            attention = SinkAttention(
                args.dim,
                args.n_heads,
                args.n_kv_heads,
                args.head_dim,
                rotary,
                cores[args.window(layer)],
            )
            return DecoderBlock(args, attention, moe=_build_moe(args))

        super().__init__(args, build_block)
        self.use_local_masks(
            kernel, args.max_seq_len, window=args.sliding_window_size, has_sink=True
        )


def _build_rotary(args: GptOssArgs) -> RotaryEmbedding:
    if args.rope_factor == 1.0:
        return RotaryEmbedding(args.head_dim, args.max_seq_len, args.rope_theta)
    yarn = Yarn(
        args.rope_factor, args.original_seq_len, args.beta_fast, args.beta_slow, is_rounded=False
    )
    scale = yarn.table_scale(1.0)
    return RotaryEmbedding(
        args.head_dim, args.max_seq_len, args.rope_theta, scaling=yarn, scale=scale
    )


def _build_moe(args: GptOssArgs) -> MoE:
    router = Router(
        args.dim,
        args.num_experts,
        args.top_k,
        score_func="softmax",
        normalize=True,
        scale=1.0,
        has_bias=True,
    )
    return MoE(
        router,
        BiasedExperts(args.num_experts, args.dim, args.moe_inter_dim, args.swiglu_limit),
        shared_experts=None,
        balance=Balance(args.load_balance, args.load_balance_coeff, args.router_z_coeff),
    )
