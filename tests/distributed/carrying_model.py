"""A variant of the outside model whose pipeline stages exchange more than hidden states.

Load it with `experimental.custom_import = "tests.distributed.carrying_model"`. `stage_tensors` has
one tensor of each kind that a stage must pass on unchanged.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.distributed import outside_model
from torchtitan_like.models import StageTensor, register


@dataclass(frozen=True)
class CarryingArgs(outside_model.OutsideArgs):
    """`without_gradient`: also pass a float and an integer tensor that have no gradient."""

    n_layers: int = 4
    without_gradient: bool = True


WITH_GRADIENT = (
    StageTensor("running", ("batch", "hidden_seq", 32)),  # changed by every stage
    StageTensor("first", ("batch", "hidden_seq", 32)),  # passed on unchanged, used by the last
    StageTensor("unused", ("batch", "hidden_seq", 32)),  # a view that no later stage uses
)
WITHOUT_GRADIENT = (
    StageTensor("squares", ("batch",), dtype="float64", requires_grad=False),
    StageTensor("ids", ("batch", "seq"), dtype="int64", requires_grad=False),
)


def stage_tensors(args: CarryingArgs) -> tuple[StageTensor, ...]:
    """Return the tensors that each stage of `CarryingGPT` sends after the hidden states."""
    return WITH_GRADIENT + WITHOUT_GRADIENT if args.without_gradient else WITH_GRADIENT


class CarryingGPT(outside_model.GPT):
    """A GPT whose head also reads values accumulated over all earlier blocks."""

    def __init__(self, args: CarryingArgs) -> None:
        super().__init__(args)
        self.without_gradient = args.without_gradient

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        running: Tensor | None = None,
        first: Tensor | None = None,
        unused: Tensor | None = None,
        squares: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Run `GPT.forward`; every stage except the last returns the inputs of the next stage."""
        x = tokens
        if self.wte is not None:
            x = first = self.wte(tokens)
            ids, running = tokens, torch.zeros_like(x)
            squares = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        if squares is not None:
            assert squares.dtype == torch.float64, "the framework cast a stage input"
        for block in self.h.values():
            x = block(x, positions)
            running = running + 0.5 * x
            if self.without_gradient:
                squares = squares + x.detach().double().square().mean(dim=(1, 2))
        if self.lm_head is None:
            with_gradient = (x, running, first, x.view_as(x))
            return (*with_gradient, squares, ids) if self.without_gradient else with_gradient
        x = x + running + 0.25 * first
        if self.without_gradient:
            weight = 1 + squares[:, None] + (ids % 2)
            x = x * weight.to(x.dtype).unsqueeze(-1)
        x = self.ln_f(x + 0.5)
        out: Tensor = self.lm_head(x, labels)
        return out


SPEC = dataclasses.replace(
    outside_model.SPEC,
    name="carrying",
    args_type=CarryingArgs,
    flavors={"tiny": CarryingArgs()},
    build=CarryingGPT,
    stage_tensors=stage_tensors,
)
register(SPEC)
