"""bfloat16 computes; float32 holds the weights, reduces the gradients (see test_collectives) and adds them up."""

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


def types_in_a_step(argv):
    """dtypes: of stored weights, of optimizer states, and of the weights and inputs that blocks compute with."""
    trainer = build(argv)
    computed = set()

    def note(block, args):
        computed.update({block.attention.wq.weight.dtype, args[0].dtype})

    for block in trainer.parts[0].layers.values():
        block.attention_norm.register_forward_pre_hook(lambda norm, args, block=block: note(block, args))
    fetched = trainer.fetch(1)
    trainer.train_step(1, fetched, fetched.agreement.wait())
    stored = {p.dtype for p in trainer.optimizer.parameters}
    states = {value.dtype for value in trainer.optimizer.state_dict().values()}
    moved = any((p - p.bfloat16().float()).abs().max() > 0 for p in map(local, trainer.optimizer.parameters))
    release(trainer)
    return stored, states, computed, moved


def local(tensor):
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("stored", "computed"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
def test_types(tmp_path, name, stored, computed):
    """On every layout, the unusual pairs too: what is stored in bfloat16 can be computed with in float32."""
    world_size, overrides = LAYOUTS[name]
    argv = options(
        str(tmp_path / "run"),
        "float32",
        **{"training.dtype": stored, "training.mixed_precision_param": computed, **overrides},
        **{"training.local_batch_size": 8 // world_size},
    )
    for weights, states, used, has_fp32_digits in run_ranks(types_in_a_step, world_size, argv):
        assert weights == {getattr(torch, stored)}
        assert states == {torch.float32, getattr(torch, stored)}
        assert used == {getattr(torch, computed)}
        assert has_fp32_digits == (stored == "float32")


def accumulated_and_apart(argv):
    """Gradients of all micro-batches as a step accumulates them, and the sum of those of each alone."""
    trainer = build(argv)
    batch = next(trainer.batches)

    def gradients(micro_batches):
        trainer.optimizer.zero_grad()
        for micro in micro_batches:
            trainer.gradient_sync.prepare(is_last=micro == micro_batches[-1])
            (trainer.parts[0](batch.tokens[micro], batch.labels[micro]) / 100).backward()
        return {name: full(p.grad) for name, p in trainer.optimizer.named}

    everything = list(range(trainer.geometry.num_micro_batches))
    together = gradients(everything)
    alone = [gradients([micro]) for micro in everything]
    release(trainer)
    return together, {name: sum(each[name] for each in alone) for name in together}


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_accumulate_in_float32(tmp_path, name):
    """The same products in bfloat16, so that only the adding up differs: a bfloat16 accumulator is off by 1e-3."""
    world_size, overrides = LAYOUTS[name]
    argv = options(
        str(tmp_path / "run"),
        "float32",
        **{"training.mixed_precision_param": "bfloat16", "training.local_batch_size": 1, **overrides},
        **{"training.global_batch_size": 8 * world_size},
    )
    together, apart = run_ranks(accumulated_and_apart, world_size, argv)[0]
    for parameter, expected in apart.items():
        error = np.linalg.norm(together[parameter] - expected) / np.linalg.norm(expected)
        assert error <= 1e-6, f"{parameter}: {error:.1e}"
