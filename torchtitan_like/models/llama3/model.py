"""Llama 3: the shared decoder with rotary frequencies scaled as in Llama 3.1 (arXiv:2407.21783)."""

from __future__ import annotations

from torchtitan_like.models.layers.attention import Attention
from torchtitan_like.models.layers.decoder import Decoder, DecoderBlock
from torchtitan_like.models.layers.feed_forward import FeedForward
from torchtitan_like.models.layers.kernels import attention_kernel
from torchtitan_like.models.layers.rotary import Llama3, RotaryEmbedding
from torchtitan_like.models.llama3.flavors import LlamaArgs


class Transformer(Decoder):
    """A Llama 3 model of the given sizes; see `Decoder` for inputs and outputs."""

    def __init__(self, args: LlamaArgs) -> None:
        scaling = Llama3(
            args.rope_scaling_factor,
            args.rope_low_freq_factor,
            args.rope_high_freq_factor,
            args.rope_original_max_seq_len,
        )
        rotary = RotaryEmbedding(args.head_dim, args.max_seq_len, args.rope_theta, scaling=scaling)
        core = attention_kernel(args.attn_type).core

        def build_block(layer: int) -> DecoderBlock:
            attention = Attention(
                args.dim, args.n_heads, args.num_kv_heads, args.head_dim, rotary, core
            )
            return DecoderBlock(args, attention, FeedForward(args.dim, args.ffn_dim))

        super().__init__(args, build_block)
