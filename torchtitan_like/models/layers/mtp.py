"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).

After the model's own blocks, one block for each depth k predicts the label k positions later.
This adds a loss to training. Evaluation and generation do not run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan_like.models.layers.decoder import Decoder, DecoderArgs, DecoderBlock
from torchtitan_like.models.layers.head import LossWithMTP, total_of
from torchtitan_like.models.layers.norm import RMSNorm
from torchtitan_like.util.labels import IGNORED_LABEL


class MTPArgs(DecoderArgs, Protocol):
    """The sizes and options of a `MTPDecoder`."""

    @property
    def num_mtp_layers(self) -> int: ...
    @property
    def mtp_loss_weight(self) -> float: ...


class MTPBlock(DecoderBlock):
    """A decoder block whose input joins a later token's embedding and the hidden states before it.

    Equations 21 and 22, with the embedding first, as in the published weights. The result is
    normed: it is the input of the output head and of the next depth.
    """

    def __init__(
        self,
        args: DecoderArgs,
        attention: nn.Module,
        feed_forward: nn.Module | None = None,
        moe: nn.Module | None = None,
    ) -> None:
        super().__init__(args, attention, feed_forward, moe)
        self.enorm = RMSNorm(args.dim, args.norm_eps)
        self.hnorm = RMSNorm(args.dim, args.norm_eps)
        self.eh_proj = nn.Linear(2 * args.dim, args.dim, bias=False)
        self.norm = RMSNorm(args.dim, args.norm_eps)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        embeddings: Tensor,
        positions: Tensor | None = None,
        mask: Any = None,
    ) -> Tensor:
        """Map hidden states x and embeddings (batch, seq, dim) to the same shape."""
        joined = torch.cat([self.enorm(embeddings), self.hnorm(x)], dim=-1)
        out: Tensor = self.norm(super().forward(self.eh_proj(joined), positions, mask))
        return out


class MTPDecoder(Decoder):
    """A `Decoder` with blocks for multi-token prediction, which share its embedding and head.

    `layers` also contains the `num_mtp_layers` MTP blocks, after the model's own blocks. With 0 MTP
    blocks, this is a plain `Decoder`. MTP blocks need the whole model, so pipelines do not support
    them.

    build_mtp_block: returns a new `MTPBlock` for a layer's number.
    """

    def __init__(
        self,
        args: MTPArgs,
        build_block: Callable[[int], nn.Module],
        build_mtp_block: Callable[[int], nn.Module],
    ) -> None:
        super().__init__(args, build_block)
        self.num_mtp_layers = args.num_mtp_layers
        self.mtp_loss_weight = args.mtp_loss_weight
        for layer in range(args.n_layers, args.n_layers + args.num_mtp_layers):
            self.layers[str(layer)] = build_mtp_block(layer)

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """As `Decoder.forward`. In training, with labels, return a `LossWithMTP`.

        positions, where given, also limit the loss to labels of a token's own document. With
        labels, attention uses them only if it ends at document borders.
        """
        if self.num_mtp_layers == 0:
            return super().forward(tokens, labels, positions)
        depths = range(1, self.num_mtp_layers + 1 if self.training and labels is not None else 1)
        # The embedding and the head run once for all depths: FSDP2 then gathers them once.
        ids = torch.cat([tokens, *(shift_tokens(tokens, depth) for depth in depths)])
        h, *embeddings = self.tok_embeddings(ids).chunk(1 + len(depths))
        mask = self.build_mask(tokens, positions, h.dtype)
        rotary_positions = positions
        if mask is None and labels is not None:
            rotary_positions = None
        blocks = list(self.layers.values())
        for block in blocks[: -self.num_mtp_layers]:
            h = block(h, rotary_positions, mask)
        hidden = [self.norm(h)]
        if not depths:
            return cast(Tensor, self.output(hidden[0], labels))
        assert labels is not None
        mtp_blocks = blocks[-self.num_mtp_layers :]
        for block, embedding in zip(mtp_blocks, embeddings, strict=True):
            hidden.append(block(hidden[-1], embedding, rotary_positions, mask))
        mtp_labels = [shift_labels(labels, depth, positions) for depth in depths]
        loss, *mtp_losses = self.output(torch.cat(hidden), labels, mtp_labels)
        mtp_loss = torch.stack([total_of(each) for each in mtp_losses]).mean()
        return cast(Tensor, LossWithMTP(loss, mtp_loss, self.mtp_loss_weight))


def shift_tokens(tokens: Tensor, depth: int) -> Tensor:
    """Return for each position the token `depth` positions later, or 0 beyond the end.

    tokens: int64 (batch, seq).
    """
    return F.pad(tokens[:, depth:], (0, depth))


def shift_labels(labels: Tensor, depth: int, positions: Tensor | None) -> Tensor:
    """Return for each position the label `depth` positions later, or -100 if it is ignored.

    Labels beyond the end of the sample, and labels in another document, are ignored.

    labels: int64 (batch, seq). positions: int64 (batch, seq), of each token in its document; None:
        each sample is one document.
    """
    later = F.pad(labels[:, depth:], (0, depth), value=IGNORED_LABEL)
    if positions is None:
        return later
    is_same_document = F.pad(positions[:, depth:], (0, depth), value=-1) == positions + depth
    return later.where(is_same_document, IGNORED_LABEL)
