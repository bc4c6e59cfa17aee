"""Mixed precision: dtypes of weights, optimizer states, computation and gradient accumulation.

test_collectives.py tests the dtypes of communication.
"""

import numpy as np
import pytest
import torch

from tests.distributed.parity import build, full, options, release
from tests.harness.rank_pool import run_ranks

LAYOUTS = {
    "one": (1, {}),
    "fsdp": (2, {}),
    "ddp": (2, {"parallelism.data_parallel_replicate_degree": 2}),
    "hsdp": (4, {"parallelism.data_parallel_replicate_degree": 2}),
    "tp": (2, {"parallelism.tensor_parallel_degree": 2}),
}


EVERY_LAYOUT = [
    pytest.param(name, marks=[pytest.mark.nightly] if name in ("hsdp", "tp") else [])
    for name in LAYOUTS
]


def dtypes_of_a_step(argv):
    """Return the dtypes of weights, optimizer states and block computation.

    The last value is whether any weight has more precision than bfloat16.
    """
    trainer = build(argv)
    computed = set()

    def record_dtypes(block, args):
        computed.update({block.attention.wq.weight.dtype, args[0].dtype})

    for block in trainer.parts[0].layers.values():
        block.attention_norm.register_forward_pre_hook(
            lambda norm, args, block=block: record_dtypes(block, args)
        )
    fetched = trainer.fetch(1)
    trainer.train_step(1, fetched, fetched.agreement.wait())
    stored = {p.dtype for p in trainer.optim.optimizer.parameters}
    states = {value.dtype for value in trainer.optim.optimizer.state_dict().values()}
    has_fp32_digits = any(
        (p - p.bfloat16().float()).abs().max() > 0
        for p in map(local, trainer.optim.optimizer.parameters)
    )
    release(trainer)
    return stored, states, computed, has_fp32_digits


def local(tensor):
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


@pytest.mark.parametrize("name", EVERY_LAYOUT)
@pytest.mark.parametrize(
    ("stored", "computed"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")],
)
def test_weights_states_and_computation_have_the_configured_dtypes(
    tmp_path, name, stored, computed
):
    """Unusual combinations work too, such as bfloat16 weights with float32 computation."""
    world_size, overrides = LAYOUTS[name]
    argv = options(
        str(tmp_path / "run"),
        "float32",
        **{"training.dtype": stored, "training.mixed_precision_param": computed, **overrides},
        **{"training.local_batch_size": 8 // world_size},
    )
    for weights, states, block_dtypes, has_fp32_digits in run_ranks(
        dtypes_of_a_step, world_size, argv
    ):
        assert weights == {getattr(torch, stored)}
        assert states == {torch.float32, getattr(torch, stored)}
        assert block_dtypes == {getattr(torch, computed)}
        assert has_fp32_digits == (stored == "float32")


def accumulated_and_summed_gradients(argv):
    """Return the accumulated gradients of a step, and the sum of separate micro-batch gradients."""
    trainer = build(argv)
    batch = next(trainer.batches)

    def gradients(micro_batches):
        trainer.optim.optimizer.zero_grad()
        for micro in micro_batches:
            trainer.step_runner.gradient_sync.prepare(is_last=micro == micro_batches[-1])
            (trainer.parts[0](batch.tokens[micro], batch.labels[micro]) / 100).backward()
        return {name: full(p.grad) for name, p in trainer.optim.optimizer.named}

    micro_batches_of_step = list(range(trainer.run.geometry.num_accumulated))
    accumulated = gradients(micro_batches_of_step)
    separate = [gradients([micro]) for micro in micro_batches_of_step]
    release(trainer)
    return accumulated, {
        name: sum(gradient_set[name] for gradient_set in separate) for name in accumulated
    }


@pytest.mark.parametrize("name", EVERY_LAYOUT)
def test_gradients_accumulate_in_float32(tmp_path, name):
    """Both sides compute in bfloat16, so only the accumulation differs.

    A bfloat16 accumulator would have an error of 1e-3.
    """
    world_size, overrides = LAYOUTS[name]
    argv = options(
        str(tmp_path / "run"),
        "float32",
        **{
            "training.mixed_precision_param": "bfloat16",
            "training.local_batch_size": 1,
            **overrides,
        },
        **{"training.global_batch_size": 8 * world_size},
    )
    accumulated, summed = run_ranks(accumulated_and_summed_gradients, world_size, argv)[0]
    for parameter, expected in summed.items():
        error = np.linalg.norm(accumulated[parameter] - expected) / np.linalg.norm(expected)
        assert error <= 1e-6, f"{parameter}: {error:.1e}"
