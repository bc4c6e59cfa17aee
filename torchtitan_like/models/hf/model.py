"""Dense decoders of the Hugging Face Hub: the shared decoder with biases, windows, rotary scalings."""

from __future__ import annotations

from torchtitan_like.models.hf.flavors import HfArgs
from torchtitan_like.models.layers.attention import Attention, NormedAttention
from torchtitan_like.models.layers.decoder import Decoder, DecoderBlock
from torchtitan_like.models.layers.feed_forward import FeedForward
from torchtitan_like.models.layers.kernels import Core, attention_kernel
from torchtitan_like.models.layers.local_attention import local_core, local_masks
from torchtitan_like.models.layers.rotary import (
    DynamicRotaryEmbedding,
    Linear,
    Llama3,
    RotaryEmbedding,
    Scaling,
    Yarn,
)


class Transformer(Decoder):
    """A dense decoder of the given sizes; see `Decoder` for inputs and outputs."""

    def __init__(self, args: HfArgs) -> None:
        rotary = _build_rotary(args)
        kernel = attention_kernel(args.attn_type)
        # Layers of a kind share a function, so that they share a compilation.
        cores = {
            window: local_core(kernel, window=window) if args.sliding_window_size else kernel.core
            for window in {args.window(layer) for layer in range(args.n_layers)}
        }

        def build_block(layer: int) -> DecoderBlock:
            attention = _build_attention(args, rotary, cores[args.window(layer)])
            feed_forward = FeedForward(args.dim, args.hidden_dim, has_bias=args.mlp_bias)
            return DecoderBlock(args, attention, feed_forward)

        super().__init__(args, build_block)
        if self.attention_mask is not None and args.sliding_window_size:
            self.attention_mask = local_masks(kernel.mask, window=args.sliding_window_size)


def _build_attention(args: HfArgs, rotary: RotaryEmbedding, core: Core) -> Attention:
    sizes = (args.dim, args.n_heads, args.n_kv_heads, args.head_dim)
    biases = {"qkv_bias": args.has_qkv_bias, "output_bias": args.attention_bias}
    if args.has_qk_norm:
        return NormedAttention(*sizes, rotary, core, args.norm_eps, **biases)
    return Attention(*sizes, rotary, core, **biases)


def _build_rotary(args: HfArgs) -> RotaryEmbedding:
    if args.rope_type == "dynamic":
        return DynamicRotaryEmbedding(
            args.head_dim,
            args.max_seq_len,
            args.rope_theta,
            factor=args.rope_factor,
            original_max_seq_len=args.rope_original_seq_len,
        )
    scalings: dict[str, Scaling] = {
        "linear": Linear(args.rope_factor),
        "llama3": Llama3(
            args.rope_factor,
            args.rope_low_freq_factor,
            args.rope_high_freq_factor,
            args.rope_original_seq_len,
        ),
        "yarn": Yarn(
            args.rope_factor,
            args.rope_original_seq_len,
            args.rope_beta_fast,
            args.rope_beta_slow,
            is_rounded=args.rope_truncate,
        ),
    }
    return RotaryEmbedding(
        args.head_dim,
        args.max_seq_len,
        args.rope_theta,
        scaling=scalings.get(args.rope_type),
        scale=args.rope_attention_factor if args.rope_type == "yarn" else 1.0,
    )
