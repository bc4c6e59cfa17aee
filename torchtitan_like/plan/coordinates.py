"""Coordinate check: how the outputs of a model's modules grow with its width while it trains.

    python -m torchtitan_like.plan.coordinates CONFIG [--widths 64,128,256,512] [--steps 10]
        [--seeds 6] [--csv FILE] [--section.key VALUE ...]

In a parametrization that transfers hyperparameters, their sizes do not depend on the width after
any step (Yang et al. 2021, arXiv:2203.03466, appendix D.1). Trains the model at several widths on a
few random tokens, and prints for each module and step the slope of log RMS of its output over log
width. Heads and routers show the change since step 0. Slopes beyond 0.1 have a *. Returns 0 if none
has one, else 1, 2 for wrong arguments or widths, and 78 for a configuration that cannot work.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean, linear_regression
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan_like.check import load_for_command
from torchtitan_like.check.model_checks import check_model
from torchtitan_like.config import ConfigError, JobConfig
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.distributed.matrices import MatrixOwners
from torchtitan_like.models.layers.head import OutputHead
from torchtitan_like.models.layers.moe import Router
from torchtitan_like.models.layers.norm import RMSNorm
from torchtitan_like.models.parametrization import WIDTH_KEYS
from torchtitan_like.models.spec import ModelSpec, fit_positions, with_reference_attention
from torchtitan_like.optim.optimizer import OptimizerContext, build_optimizer
from torchtitan_like.util.bundle import find_config
from torchtitan_like.util.exit_codes import WRONG_INPUT
from torchtitan_like.util.files import write_atomically
from torchtitan_like.util.output import show_error, show_problem
from torchtitan_like.util.shards import local_positions

GROWS = 1  # the exit code
TOLERANCE = 0.1  # of a slope
# A small batch of few different tokens: the parts of an update that are due to chance are then small
# at narrow widths too. The vocabulary is as small, so that a step is fast.
BATCH_SIZE, SEQ_LEN = 2, 16
NUM_IDS, VOCAB_SIZE = 8, 64


class Growth(NamedTuple):
    """The sizes of one module's output after a step, at each width.

    rms: root mean squares, geometric means over seeds. Of heads and routers it is the change since
        step 0: their first outputs shrink with the width by design.
    slope: of log rms over log width; 0 if it does not depend on the width.
    """

    module: str
    step: int
    rms: tuple[float, ...]
    slope: float

    @property
    def is_flat(self) -> bool:
        return abs(self.slope) <= TOLERANCE


def check_coordinates(
    config: JobConfig,
    widths: Sequence[int],
    num_steps: int,
    *,
    num_seeds: int = 6,
) -> list[Growth]:
    """Train the model of a configuration at several widths, on one batch of random tokens.

    Heads keep their size, all widths grow in proportion (Llama rounds its feed-forward width up to
    `multiple_of`, which stays), and the vocabulary has `VOCAB_SIZE` tokens.
    Each step is one of `[optimizer]` with the peak learning rate, on the CPU. Returns a row for each
    module and step, 0 to num_steps.
    Raises ValueError or ConfigError if the model does not exist at a width.
    """
    samples: dict[tuple[str, int], list[float]] = {}  # of all widths and seeds, in this order
    for width in widths:
        spec, args = _model_at(config, width)
        for seed in range(num_seeds):
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(NUM_IDS, (BATCH_SIZE, SEQ_LEN + 1), generator=generator)
            for key, rms in _train(config, spec, args, seed, tokens, num_steps).items():
                samples.setdefault(key, []).append(rms)
    xs = [math.log(width) for width in widths for _ in range(num_seeds)]
    rows = []
    for key, values in samples.items():
        if len(values) == len(xs):  # else some outputs were 0
            starts = range(0, len(xs), num_seeds)
            means = tuple(geometric_mean(values[i : i + num_seeds]) for i in starts)
            slope = linear_regression(xs, [math.log(value) for value in values]).slope
            rows.append(Growth(*key, means, slope))
    return sorted(rows, key=lambda row: row.step)


def _model_at(config: JobConfig, width: int) -> tuple[ModelSpec, Any]:
    """Return the model whose widths are in proportion to `width`."""
    checked = check_model(config)
    if checked.problems:
        raise ConfigError(checked.problems)
    sizes = dataclasses.asdict(checked.args)
    changes = {}
    for key in WIDTH_KEYS:
        if value := sizes.get(key):
            changes[key], rest = divmod(value * width, checked.args.dim)
            if rest:
                raise ValueError(
                    f"width {width}: {key} = {value} would be {value * width / checked.args.dim:g}. "
                    f"Expected a whole number: choose multiples of the width of one head"
                )
    changes["vocab_size"] = VOCAB_SIZE
    section = config.model.model_copy(update={"args": {**config.model.args, **changes}})
    scaled = check_model(config.model_copy(update={"model": section}))
    if scaled.problems:
        raise ConfigError(scaled.problems)
    assert scaled.spec is not None
    return scaled.spec, scaled.args


def _train(
    config: JobConfig, spec: ModelSpec, args: Any, seed: int, tokens: Tensor, num_steps: int
) -> dict[tuple[str, int], float]:
    """Train, and return the root mean square of each module's output by module and step.

    tokens: int64 (batch, seq + 1).
    """
    args = with_reference_attention(fit_positions(args, tokens.shape[1]))
    if hasattr(args, "num_mtp_layers"):
        args = dataclasses.replace(args, num_mtp_layers=0)
    with torch.device("meta"):
        model = spec.build(args)
    materialize(model, torch.device("cpu"))
    initialize(model, spec.init_table(args), seed, spec.scale)
    context = OptimizerContext(
        spec.sharding,
        partial(MatrixOwners, group=None),
        local_positions,
        torch.device("cpu"),
        seed,
        config.extra_sections,
        spec.scale,
    )
    section = config.optimizer.model_copy(update={"early_step_in_backward": False})
    optimizer = build_optimizer(list(model.named_parameters()), section, context)
    sizes: dict[tuple[str, int], float] = {}
    first_outputs: dict[str, Tensor] = {}
    step = 0

    @torch.no_grad()
    def observe(name: str, module: nn.Module, output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        if isinstance(module, OutputHead | Router):
            output = output - first_outputs.setdefault(name, output.clone())
        elif isinstance(module, RMSNorm):  # the multiplier of a tied model is in its weight
            output = output / spec.scale(f"{name}.weight", 1).std
        if rms := output.double().square().mean().sqrt().item():
            sizes[name, step] = rms

    _observe_outputs(model, observe)
    for step in range(num_steps + 1):  # noqa: B007 (`observe` reads it)
        logits = model(tokens[:, :-1])
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.clip_gradients(config.training.max_norm)
        optimizer.step(torch.zeros(()))
    return sizes


def _observe_outputs(model: nn.Module, observe: Callable[[str, nn.Module, Any], None]) -> None:
    """Call `observe` with the output of each module, and with the logits of routers."""
    for name, module in model.named_modules():
        report = partial(observe, name, module)
        if isinstance(module, Router):  # `MoE` calls its `logits`, not the module
            router: Any = module
            router.logits = _observed(module.logits, report)
        elif name:
            module.register_forward_hook(lambda *call, report=report: report(call[2]))


def _observed(
    function: Callable[[Tensor], Tensor], report: Callable[[Tensor], None]
) -> Callable[[Tensor], Tensor]:
    """Return the function, which also reports its results."""

    def call(tokens: Tensor) -> Tensor:
        output = function(tokens)
        report(output)
        return output

    return call


# ---- the command


def slope_lines(rows: Sequence[Growth], num_steps: int) -> list[str]:
    """Return a table with a row for each module and a column for each step."""
    slopes = {(row.module, row.step): f"{row.slope:.2f}{' *'[not row.is_flat]}" for row in rows}
    modules = list(dict.fromkeys(row.module for row in rows))
    width = max(map(len, modules))
    steps = range(num_steps + 1)
    lines = [f"{'slope after step':<{width}}" + "".join(f"{step:>6} " for step in steps)]
    for module in modules:
        cells = (f"{slopes.get((module, step), '- '):>7}" for step in steps)
        lines.append(f"{module:<{width}}" + "".join(cells))
    num_growing = sum(not row.is_flat for row in rows)
    lines.append(f"{num_growing} of {len(rows)} slopes are beyond {TOLERANCE}")
    return lines


def csv_lines(rows: Sequence[Growth], widths: Sequence[int]) -> list[str]:
    """Return a header and a line with all sizes for each row."""
    lines = [f"module,step,{','.join(f'rms_{width}' for width in widths)},slope"]
    for row in rows:
        sizes = ",".join(f"{rms:.6g}" for rms in row.rms)
        lines.append(f"{row.module},{row.step},{sizes},{row.slope:.4f}")
    return lines


def _parse_widths(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if len(set(words)) < 2 or not all(word.isdecimal() and int(word) for word in words):
        expected = "Expected two different widths or more, such as 64,128"
        raise argparse.ArgumentTypeError(f"it is {text!r}. {expected}: correct it")
    return tuple(map(int, words))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; `argv` as `sys.argv[1:]`. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=find_config)
    parser.add_argument("--widths", type=_parse_widths, default=(64, 128, 256, 512))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--csv", type=Path, help="write the size of each output")
    options, settings = parser.parse_known_args(argv)
    if options.steps < 0 or options.seeds < 1:
        counts = f"--steps {options.steps} --seeds {options.seeds}"
        parser.error(f"{counts}: expected 0 steps or more, and a seed or more: correct it")
    try:
        words = ["--job.config_file", str(options.config), *settings]
        config, _ = load_for_command(words, None, training=False)
        rows = check_coordinates(config, options.widths, options.steps, num_seeds=options.seeds)
        print("\n".join(slope_lines(rows, options.steps)))
        if options.csv is not None:
            write_atomically(options.csv, "\n".join([*csv_lines(rows, options.widths), ""]))
    except ConfigError as error:
        show_error(str(error))
        return os.EX_CONFIG
    except (OSError, ValueError) as error:
        show_problem(error)
        return WRONG_INPUT
    return 0 if all(row.is_flat for row in rows) else GROWS


if __name__ == "__main__":
    sys.exit(main())
