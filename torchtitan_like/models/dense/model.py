"""Dense decoders: the shared decoder with biases, norms of queries and keys, windows, rotary scalings.

Llama 3 (arXiv:2407.21783), Mistral (arXiv:2310.06825), Qwen2 (arXiv:2407.10671), and Qwen3
(arXiv:2505.09388), whose blocks may have experts instead of a feed-forward network.
"""

from __future__ import annotations

from torchtitan_like.models.dense.flavors import DenseArgs, Qwen3Args, with_experts
from torchtitan_like.models.layers.attention import Attention
from torchtitan_like.models.layers.balance import Balance
from torchtitan_like.models.layers.decoder import Decoder, DecoderBlock, FeedForward
from torchtitan_like.models.layers.kernels import Core, attention_kernel
from torchtitan_like.models.layers.local_attention import local_core
from torchtitan_like.models.layers.moe import Experts, MoE, Router
from torchtitan_like.models.layers.rotary import (
    DynamicRotaryEmbedding,
    Linear,
    Llama3,
    RotaryEmbedding,
    Scaling,
    Yarn,
)


class Transformer(Decoder):
    """A decoder of the given sizes; see `Decoder` for inputs and outputs."""

    def __init__(self, args: DenseArgs) -> None:
        rotary = _build_rotary(args)
        kernel = attention_kernel(args.attn_type)
        # Layers of a kind share a function, so that they share a compilation.
        cores = {
            window: (
                local_core(kernel.core, is_local=window > 0)
                if args.sliding_window_size
                else kernel.core
            )
            for window in {args.window(layer) for layer in range(args.n_layers)}
        }

        def build_block(layer: int) -> DecoderBlock:
            attention = _build_attention(args, rotary, cores[args.window(layer)])
            if experts := with_experts(args):
                return DecoderBlock(args, attention, moe=_build_moe(experts))
            feed_forward = FeedForward(args.dim, args.ffn_dim, has_bias=args.mlp_bias)
            return DecoderBlock(args, attention, feed_forward)

        super().__init__(args, build_block)
        if args.sliding_window_size:
            self.use_local_masks(kernel, args.max_seq_len, window=args.sliding_window_size)


def _build_attention(args: DenseArgs, rotary: RotaryEmbedding, core: Core) -> Attention:
    return Attention(
        args.dim,
        args.n_heads,
        args.num_kv_heads,
        args.head_dim,
        rotary,
        core,
        qkv_bias=args.has_qkv_bias,
        output_bias=args.attention_bias,
        qk_norm_eps=args.norm_eps if args.has_qk_norm else None,
    )


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


def _build_rotary(args: DenseArgs) -> RotaryEmbedding:
    rope = args.rope
    sizes = (args.head_dim, args.max_seq_len, args.rope_theta)
    original = rope.original_seq_len
    if rope.type == "dynamic":
        return DynamicRotaryEmbedding(*sizes, factor=rope.factor, original_max_seq_len=original)
    scalings: dict[str, Scaling] = {
        "linear": Linear(rope.factor),
        "llama3": Llama3(rope.factor, rope.low_freq_factor, rope.high_freq_factor, original),
        "yarn": Yarn(
            rope.factor, original, rope.beta_fast, rope.beta_slow, is_rounded=rope.truncate
        ),
    }
    scale = rope.attention_factor if rope.type == "yarn" else 1.0
    return RotaryEmbedding(*sizes, scaling=scalings.get(rope.type), scale=scale)
