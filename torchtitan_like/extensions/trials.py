"""Call extensions once before a run, on small inputs, to find errors before the first step."""

from __future__ import annotations

import math

from torchtitan_like.extensions.optimizers import ExtensionError
from torchtitan_like.extensions.protocols import Settings
from torchtitan_like.util import registry


def try_loss(name: str, vocab_size: int, settings: Settings) -> None:
    """Compute the losses of a few tokens, together and alone.

    Raises ExtensionError if they have another shape, are not differentiable, or depend on other
    tokens; and the errors of user code.
    """
    import torch

    function = registry.find("loss", name)
    generator = torch.Generator().manual_seed(0)
    num_tokens = 6
    logits = torch.randn((num_tokens, vocab_size), generator=generator)
    labels = torch.randint(vocab_size, (num_tokens,), generator=generator)
    losses = function(logits.requires_grad_(), labels, settings)
    shape = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
    if shape != (num_tokens,):
        raise ExtensionError(
            f"the loss {name!r} returns {shape} for logits {tuple(logits.shape)}. Expected the "
            f"loss of each token, ({num_tokens},): do not reduce it"
        )
    if not losses.requires_grad:
        raise ExtensionError(
            f"the loss {name!r} has no gradient. Expected a differentiable function of the "
            "logits: do not detach them"
        )
    alone = torch.cat(
        [function(logits[i : i + 1], labels[i : i + 1], settings) for i in range(num_tokens)]
    )
    # Sums over the vocabulary may differ in the last bits of float32.
    if not torch.allclose(losses, alone, rtol=1e-4, atol=1e-5, equal_nan=True):
        raise ExtensionError(
            f"the loss {name!r} of a token depends on the other tokens. Expected a function of the "
            "token's own logits and label, because the loss is computed for parts of a batch: do "
            "not normalize over tokens"
        )


def try_schedule(name: str, total_steps: int, settings: Settings) -> None:
    """Compute the factors of a few steps.

    Raises ExtensionError for a value that is no finite number >= 0; and the errors of user code.
    """
    for step in sorted({1, max(1, total_steps // 2), total_steps, total_steps + 1}):
        factor = registry.find("lr_schedule", name)(step, total_steps, settings)
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not is_number or not math.isfinite(factor) or factor < 0:
            raise ExtensionError(
                f"the learning-rate schedule {name!r} returns {factor!r} for step {step:,} of "
                f"{total_steps:,}. Expected a finite number >= 0: correct it"
            )
