"""Initial weights depend only on seed, parameter name and element index."""

import math
import os
import statistics
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn

from tests.harness.rank_pool import run_ranks
from torchtitan_like.distributed import initialize as subject
from torchtitan_like.distributed.initialize import BLOCK, initialize, materialize, weight_hash
from torchtitan_like.models import InitRule, get_spec, resolve_args

LLAMA = get_spec("llama3")
# The weights of `debugmodel` at seed 42 are part of the interface. Releases do not change them.
DEBUGMODEL_HASH = 0x66D9833CB93B0ACF
NORMAL = (("*", InitRule("normal", 1.0)),)


def llama(overrides=None, dtype=torch.float32, seed=42):
    args = resolve_args(LLAMA, "debugmodel", {"max_seq_len": 32} | (overrides or {}))
    with torch.device("meta"):
        model = LLAMA.build(args).to(dtype)
    materialize(model, torch.device("cpu"))
    initialize(model, LLAMA.init_table(args), seed)
    return model


class Holder(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, float("nan"))))


def draw(rule, shape, seed=0, name="weight"):
    holder = Holder(**{name: shape})
    initialize(holder, ((name, rule),), seed)
    return holder.get_parameter(name).detach()


def test_weights_of_the_debug_model_are_fixed():
    assert weight_hash(llama()) == DEBUGMODEL_HASH
    assert weight_hash(llama(seed=43)) != DEBUGMODEL_HASH


def test_values_follow_the_formula():
    """Compare with splitmix64 on Python integers and the quantile of Python's library."""
    from hashlib import blake2b

    def value(seed, name, index):
        x = int.from_bytes(blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")
        x = (x + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        x ^= x >> 31
        return statistics.NormalDist().inv_cdf(((x >> 12) + 0.5) / 2**52)

    holder = Holder(weight=(50, 20)).double()
    initialize(holder, (("weight", InitRule("normal", 3.0)),), 7)
    expected = torch.tensor([3.0 * value(7, "weight", i) for i in range(1000)], dtype=torch.float64)
    torch.testing.assert_close(holder.weight.detach().flatten(), expected, rtol=1e-14, atol=1e-15)


HASH_PROGRAM = """
import torch
torch.set_num_threads({threads})
from tests.unit.models.test_initialize import llama, weight_hash
print(hex(weight_hash(llama(dict(n_layers=2)))), torch.backends.cpu.get_cpu_capability())
"""


def test_weights_do_not_depend_on_threads_or_cpu_capability():
    """Numpy's CPU features are disabled too, except for its baseline."""
    expected = hex(weight_hash(llama({"n_layers": 2})))
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", HASH_PROGRAM.format(threads=threads)],
            env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for threads, environment in (
            (2, {}),
            (1, {"ATEN_CPU_CAPABILITY": "default", "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512_SKX"}),
        )
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300) for process in processes]
    for process, (stdout, stderr) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, stderr
        assert stdout.split()[0] == expected, stdout


@pytest.mark.parametrize(
    ("rule", "low", "high", "std"),
    [
        (InitRule("normal", 0.5), -math.inf, math.inf, 0.5),
        (InitRule("trunc_normal", 0.02, 100.0), -math.inf, math.inf, 0.02),
        (InitRule("trunc_normal", 2.0, 3.0), -6.0, 6.0, 2.0 * 0.98658),
        (InitRule("trunc_normal", 1.0, 1.0), -1.0, 1.0, 0.53956),
    ],
)
def test_distribution_of_weights(rule, low, high, std):
    """Moments of a million draws are within 5 standard errors. Truncation is exact."""
    x = draw(rule, (1000, 1000)).double()
    count = x.numel()
    assert low <= x.min() and x.max() <= high
    assert abs(x.mean()) < 5 * std / count**0.5
    assert x.std() == pytest.approx(std, rel=5 / count**0.5)
    normal = statistics.NormalDist(0, rule.std)
    below = normal.cdf(low) if low > -math.inf else 0.0
    for z in (-0.9, -0.3, 0.0, 0.5, 0.95):
        expected = (normal.cdf(z * rule.std) - below) / (1 - 2 * below)
        assert (x < z * rule.std).double().mean() == pytest.approx(expected, abs=2.5 / count**0.5)


def test_constant_rules():
    assert torch.equal(draw(InitRule("ones"), (5,)), torch.ones(5))
    assert torch.equal(draw(InitRule("zeros"), (2, 3)), torch.zeros(2, 3))


def test_neighboring_elements_names_and_seeds_are_uncorrelated():
    rule, shape = InitRule("normal", 1.0), (500, 400)
    x = draw(rule, shape)
    others = [
        x.roll(1),
        x.roll(400),
        draw(rule, shape, seed=1),
        draw(rule, shape, name="weights"),
    ]
    for other in others:
        assert abs((x * other).mean()) < 5 / x.numel() ** 0.5


def test_bfloat16_weights_are_rounded_fp32_weights():
    fp32_model, bf16_model = llama({"n_layers": 1}), llama({"n_layers": 1}, torch.bfloat16)
    for (name, fp32_weight), (_, bf16_weight) in zip(
        fp32_model.named_parameters(), bf16_model.named_parameters(), strict=True
    ):
        assert torch.equal(fp32_weight.bfloat16(), bf16_weight), name
    assert weight_hash(llama({"n_layers": 1}, torch.float64)) == weight_hash(fp32_model)


def test_a_tied_weight_is_drawn_once():
    model = llama({"enable_weight_tying": True})
    assert model.output.weight is model.tok_embeddings.weight
    largest = 3 * llama().output.weight.shape[1] ** -0.5
    assert 0.9 * largest < model.output.weight.abs().max() <= largest, (
        "expected the rule of the output, not of the embedding"
    )


def test_a_parameter_without_a_rule_is_reported():
    with pytest.raises(ValueError, match=r"no rule of the init table matches \['bias', 'scale'\]"):
        initialize(Holder(bias=(2,), weight=(2, 2), scale=(2,)), (("weight", InitRule("ones")),), 0)


def test_the_first_matching_rule_applies():
    holder = Holder(weight=(2, 2))
    initialize(holder, (("w*", InitRule("ones")), ("*", InitRule("zeros"))), 0)
    assert holder.weight.sum() == 4


@pytest.mark.parametrize("damage", ["swap", "one bit", "rows"])
def test_the_hash_depends_on_every_element_and_its_index(damage):
    holder = Holder(weight=(300, 200))
    initialize(holder, NORMAL, 0)
    before, weight = weight_hash(holder), holder.weight.data
    if damage == "swap":
        weight[0, 0], weight[299, 199] = weight[299, 199].item(), weight[0, 0].item()
    elif damage == "one bit":
        weight.view(torch.int32)[150, 7] ^= 1
    else:
        weight.copy_(weight.roll(1, dims=0))
    assert weight_hash(holder) != before
    assert weight_hash(Holder(weight=(0,))) == 0


def test_memory_does_not_depend_on_the_size_of_a_parameter():
    holder = Holder(weight=(2000, 1000))
    initialize(Holder(weight=(2, 2)), NORMAL, 0)
    tracemalloc.start()
    initialize(holder, NORMAL, 0)
    weight_hash(holder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 8 * BLOCK < 8 * holder.weight.numel()


# ---- on a mesh


LAYOUTS = {
    "fsdp 4": ((4,), "fsdp"),
    "ddp 4": ((4,), "ddp"),
    "hsdp 2x2": ((2, 2), "hsdp"),
    "fsdp x tp 2x2": ((2, 2), "fsdp x tp"),
}
SMALL = {
    "dim": 24,
    "n_heads": 2,
    "n_layers": 2,
    "vocab_size": 30,
    "multiple_of": 10,
    "max_seq_len": 32,
}


def build_sharded(layout, overrides):
    """Build, shard and initialize a model.

    Returns the full weights, this rank's share of the hash, dtype and sum of the rotary table, the
    loss, and whether the weights are tied.
    """
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    shape, kind = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    args = resolve_args(LLAMA, "debugmodel", SMALL | overrides)
    with torch.device("meta"):
        model = LLAMA.build(args)
    data_mesh = mesh
    if kind == "fsdp x tp":
        data_mesh = mesh["a"]
        for block in model.layers.values():
            columns = (
                "attention.wq",
                "attention.wk",
                "attention.wv",
                "feed_forward.w1",
                "feed_forward.w3",
            )
            rows = ("attention.wo", "feed_forward.w2")
            plan = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(
                rows, RowwiseParallel()
            )
            parallelize_module(block, mesh["b"], plan)
    for module in (*model.layers.values(), model):
        if kind == "ddp":
            replicate(module, mesh=mesh)
        else:
            fully_shard(
                module, mesh=data_mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            )
    materialize(model, torch.device("cpu"))
    initialize(model, LLAMA.init_table(args), 42)
    # Parameters outside the TP plan are replicated over "b" without a placement, so the hash counts
    # them twice. The test compares only weights for this layout.
    share = weight_hash(model)
    weights = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
    tokens = torch.arange(16).view(2, 8)
    loss = None if kind == "fsdp x tp" else model(tokens, tokens).item()
    rotary = model.layers["0"].attention.rotary
    tied = model.output.weight is model.tok_embeddings.weight
    return weights, share, (rotary.cos.dtype, rotary.cos.sum().item()), loss, tied


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_same_initial_weights(layout, tied):
    """4 does not divide the sizes (24, 30, 70). FSDP x TP has strided shards."""
    overrides = {"enable_weight_tying": tied}
    single_rank = llama(SMALL | overrides)
    results = run_ranks(build_sharded, 4, layout, overrides)
    rotary = single_rank.layers["0"].attention.rotary
    for weights, _, table, _, stays_tied in results:
        assert weights.keys() == dict(single_rank.named_parameters()).keys()
        for name, parameter in single_rank.named_parameters():
            assert torch.equal(weights[name], parameter), name
        assert table == (torch.float32, rotary.cos.sum().item()), (
            "expected tables without mixed precision"
        )
        assert stays_tied is tied
    if layout != "fsdp x tp 2x2":
        assert sum(share for _, share, _, _, _ in results) % 2**64 == weight_hash(single_rank)
        assert len({loss for *_, loss, _ in results}) == 1


def test_weights_of_uneven_strided_shards():
    """11 rows are sharded over TP 2 (6, 5), then over FSDP 2 (3, 3 and 3, 2). So are 11 columns."""
    results = run_ranks(build_strided_shards, 4)
    holder = Holder(a_weight=(11, 6), b_weight=(6, 11))
    initialize(holder, NORMAL, 3)
    for a, b, _ in results:
        assert torch.equal(a, holder.a_weight) and torch.equal(b, holder.b_weight)
    assert sum(share for *_, share in results) % 2**64 == weight_hash(holder)


def build_strided_shards():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    holder = Holder(a_weight=(11, 6), b_weight=(6, 11))
    for name, dim in (("a_weight", 0), ("b_weight", 1)):
        split = distribute_tensor(
            torch.zeros(holder.get_parameter(name).shape), mesh["b"], [Shard(dim)]
        )
        setattr(holder, name, nn.Parameter(split))
    fully_shard(holder, mesh=mesh["a"])
    assert isinstance(holder.a_weight.placements[0], _StridedShard)
    initialize(holder, NORMAL, 3)
    return (
        holder.a_weight.full_tensor().detach(),
        holder.b_weight.full_tensor().detach(),
        weight_hash(holder),
    )


RULES = [
    InitRule("normal", 1.0),
    InitRule("trunc_normal", 0.02, 3.0),
    InitRule("trunc_normal", 1.0, 0.1),
]


def compute_with_torch(monkeypatch):
    """MKL, whose square roots torch takes on a CPU, does not round them correctly, as CUDA does."""
    monkeypatch.setattr(subject, "_uses_numpy", lambda tensor: False)
    monkeypatch.setattr(torch, "sqrt", lambda x: torch.from_numpy(np.sqrt(x.numpy())))


@pytest.mark.parametrize("start", [0, 2**31 - 500, 2**40 + 1])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_torch_draws_and_hashes_what_numpy_does(monkeypatch, rule, start):
    """Devices compute with torch, CPUs with numpy: compared on CPU tensors, bit by bit."""
    key = subject.tensor_key(3, "weight")
    states = torch.arange(start, start + 100_001) * subject.SIGNED_GAMMA + key
    holder = Holder(weight=(33, 1, 77))
    initialize(holder, (("*", rule),), 5)
    expected = subject._draw(states.clone(), rule), holder.weight.clone(), weight_hash(holder)
    compute_with_torch(monkeypatch)
    initialize(holder, (("*", rule),), 5)
    assert torch.equal(subject._draw(states.clone(), rule), expected[0])
    assert torch.equal(holder.weight, expected[1]) and weight_hash(holder) == expected[2]


@pytest.mark.gpu
def test_a_gpu_has_the_weights_of_a_cpu():
    args = resolve_args(LLAMA, "debugmodel", {"max_seq_len": 32})
    with torch.device("meta"):
        model = LLAMA.build(args)
    materialize(model, torch.device("cuda"))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    initialize(model, LLAMA.init_table(args), 42)
    assert weight_hash(model) == DEBUGMODEL_HASH
    assert torch.cuda.max_memory_allocated() - before < 2**30


@pytest.mark.gpu
def test_a_tensor_of_several_blocks_is_drawn_alike_on_a_gpu():
    holder = Holder(weight=(3 * 2**21 + 77, 7))
    initialize(holder, NORMAL, 1)
    expected, expected_hash = holder.weight.detach().clone(), weight_hash(holder)
    holder = holder.cuda()
    size = holder.weight.numel() * 4
    torch.cuda.reset_peak_memory_stats()
    initialize(holder, NORMAL, 1)
    assert weight_hash(holder) == expected_hash
    assert torch.cuda.max_memory_allocated() - size < 2**30
    assert torch.equal(holder.weight.cpu(), expected)


def test_the_quantile_is_exact_to_4e_15(monkeypatch):
    from torchtitan_like.distributed.initialize import normal_quantile

    p = np.concatenate(
        [np.linspace(1e-4, 1 - 1e-4, 999), 2.0 ** -np.arange(2, 54), 1 - 2.0 ** -np.arange(2, 53)]
    )
    expected = np.array([statistics.NormalDist().inv_cdf(float(x)) for x in p])
    np.testing.assert_allclose(normal_quantile(p), expected, rtol=4e-15, atol=1e-16)
    compute_with_torch(monkeypatch)
    assert normal_quantile(torch.from_numpy(p)).tolist() == normal_quantile(p).tolist()
