"""Parameters and FLOPs of a model, counted from one description of its layers. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

# The formula of `ModelCost.flops_per_token`, for the log.
FLOPS_FORMULA = "6 (P - P_embedding) + 6 H (qk_dim + v_dim) sum of each layer's keys"


class LayerCost(NamedTuple):
    """The parameters of one layer, and the size of its attention.

    params: parameters that process every token; of experts, only the shared ones and the router.
    attention_width: elements of all heads that attention multiplies for each key: H (qk_dim + v_dim).
    max_keys: keys that a query attends to at most, as in a window; 0: all.
    num_experts, top_k: routed experts, and experts that process each token.
    expert_params: parameters of each routed expert.
    """

    params: int
    attention_width: int
    max_keys: int = 0
    num_experts: int = 0
    top_k: int = 0
    expert_params: int = 0


class ModelCost(NamedTuple):
    """The layers of a model, and the parameters outside of them.

    embedding: parameters of the embedding. The head has as many, or is the same tensor if `is_tied`.
    other: parameters outside of layers, embedding, and head.
    num_heads: how often the head runs for a token; more than once with multi-token prediction.
    """

    layers: tuple[LayerCost, ...]
    embedding: int
    is_tied: bool
    other: int
    num_heads: int = 1

    @property
    def num_params(self) -> int:
        """The number of parameters; a tied head counts once."""
        layers = sum(each.params + each.num_experts * each.expert_params for each in self.layers)
        return layers + self._outside_layers

    @property
    def num_active_params(self) -> int:
        """The number of parameters that process a token: without unselected experts."""
        layers = sum(each.params + each.top_k * each.expert_params for each in self.layers)
        return layers + self._outside_layers

    @property
    def _outside_layers(self) -> int:
        return self.other + self.embedding * (1 if self.is_tied else 2)

    def flops_per_token(self, seq_len: int) -> int:
        """Return `FLOPS_FORMULA`, forward and backward (PaLM, arXiv:2204.02311, appendix B).

        P counts only the experts that process a token. The embedding lookup costs nothing; the
        head's matrix product counts each time it runs, tied or not. Attention counts in full,
        including its masked half.
        """
        num_stored = 1 if self.is_tied else 2
        weights = self.num_active_params + (self.num_heads - num_stored) * self.embedding
        attention = sum(
            each.attention_width * min(each.max_keys or seq_len, seq_len) for each in self.layers
        )
        return 6 * (weights + attention)


def decoder_cost(args: Any, layers: Iterable[LayerCost], num_heads: int = 1) -> ModelCost:
    """Return the cost of a `layers.decoder.Decoder` with these layers."""
    embedding = args.vocab_size * args.dim
    return ModelCost(tuple(layers), embedding, args.enable_weight_tying, args.dim, num_heads)


def attention_params(
    dim: int,
    query_dim: int,
    key_dim: int,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
) -> int:
    """Return the parameters of the four projections of `layers.attention.Attention`.

    query_dim, key_dim: width of all queries, and of all keys or values.
    """
    biases = qkv_bias * (query_dim + 2 * key_dim) + output_bias * dim
    return 2 * dim * (query_dim + key_dim) + biases


def feed_forward_params(dim: int, hidden_dim: int, *, has_bias: bool = False) -> int:
    """Return the parameters of a gated feed-forward network, or of an expert."""
    return 3 * dim * hidden_dim + has_bias * (2 * hidden_dim + dim)
