"""Conversion to float8: converted layers, precision of products, and log lines."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchtitan_like.check.rules.compute_rules import FLOAT8_CAPABILITY
from torchtitan_like.config.sections_scale import (
    ActivationCheckpoint,
    Compile,
    Float8Linear,
    Parallelism,
)
from torchtitan_like.config.sections_training import Training
from torchtitan_like.distributed import float8
from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.float8 import HARDLY_FASTER, SMALL, convert_to_float8
from torchtitan_like.distributed.parallelize import Sections, parallelize
from torchtitan_like.distributed.row_exchange import RowExchange
from torchtitan_like.models.spec import get_spec, resolve_args

pytest.importorskip("torchao")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# Shapes in a block with 4 heads and 2 kv heads of 16 dimensions, and ffn_dim = 192.
LINEARS = {
    "attention.wq": (64, 64), "attention.wk": (32, 64), "attention.wv": (32, 64), "attention.wo": (64, 64),
    "feed_forward.w1": (192, 64), "feed_forward.w2": (64, 192), "feed_forward.w3": (192, 64),
}  # fmt: skip
SMALL_TOO = {"emulate": True, "filter_fqns": []}  # also layers that are too small to gain


def convert(num_shards=1, tp=1, **section):
    """Convert with emulation. Return the model on the meta device and the log lines."""
    spec = get_spec("llama3")
    sizes = {
        "dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "multiple_of": 16,
        "ffn_dim_multiplier": 1.13,
    }
    args = resolve_args(spec, "debugmodel", sizes)
    with torch.device("meta"):
        model = spec.build(args)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert {name: tuple(shapes[f"layers.0.{name}.weight"]) for name in LINEARS} == LINEARS
    settings = Float8Linear(**{**SMALL_TOO, **section})
    lines = convert_to_float8(model, settings, num_shards=num_shards, tp=tp, compiled=False)
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert list(model.state_dict()) == list(shapes)
    return model, lines


def converted(model):
    return {fqn for fqn, module in model.named_modules() if type(module).__name__ == "Float8Linear"}


def in_both_blocks(*names):
    return {f"layers.{i}.{name}" for i in range(2) for name in names}


# ---- converted layers


def test_every_linear_layer_except_the_head_is_converted():
    model, lines = convert()
    assert converted(model) == in_both_blocks(*LINEARS)
    assert type(model.output).__name__ == "OutputHead"
    assert lines == [
        "Float8 training active (tensorwise, emulated): 14 of 15 linear layers converted, "
        "not converted: 1 with a forward of its own: output"
    ]


def test_the_log_counts_the_layers_that_are_not_converted_for_each_reason():
    _, (line,) = convert(tp=4, filter_fqns=["feed_forward.w1", SMALL])
    assert line.endswith(
        "0 of 15 linear layers converted, not converted: "
        "8 too small to gain (auto_filter_small_kn): layers.*.attention.wo, layers.*.attention.wq, "
        "layers.*.feed_forward.w2, layers.*.feed_forward.w3; "
        "4 with dimensions that are no multiples of 64: layers.*.attention.wk, "
        "layers.*.attention.wv; 2 in filter_fqns: layers.*.feed_forward.w1; "
        "1 with a forward of its own: output"
    )


# (out, in): whether torchao's rule converts such a layer: tensorwise, rowwise.
SIZES = {
    (1024, 4096): (False, False),
    (1040, 4096): (True, False),
    (1024, 4112): (True, False),
    (2064, 2048): (True, False),
    (4112, 1040): (True, True),
    (4112, 1024): (True, False),
    (2064, 2064): (True, True),
}


@pytest.mark.parametrize(
    ("recipe", "column"), [(None, 0), ("rowwise", 1), ("rowwise_with_gw_hp", 1)]
)
def test_layers_too_small_to_gain_are_not_converted_by_default(recipe, column):
    def converted_sizes(**section):
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(k, n, bias=False) for n, k in SIZES))
        settings = Float8Linear(emulate=True, recipe_name=recipe, **section)
        convert_to_float8(model, settings, num_shards=1, tp=1, compiled=False)
        shapes = dict(zip(map(str, range(len(SIZES))), SIZES, strict=True))
        return [shapes[fqn] for fqn in sorted(converted(model))]

    large = [size for size, gains in SIZES.items() if gains[column]]
    assert converted_sizes() == converted_sizes(filter_fqns=["output", SMALL]) == large
    assert converted_sizes(filter_fqns=["output"]) == list(SIZES)  # as in TorchTitan


@pytest.mark.parametrize(
    ("width", "section", "share"),
    [
        (2064, {}, None),
        (256, {}, "0%"),
        (256, {"filter_fqns": []}, "0%"),
        (256, {"filter_fqns": [], "emulate": True}, None),
        (2064, {"filter_fqns": ["feed_forward"]}, "33%"),
    ],
)
def test_a_model_that_hardly_gains_gets_one_warning(width, section, share):
    spec = get_spec("llama3")
    sizes = {"dim": width, "n_layers": 1, "n_heads": 4, "multiple_of": 16, "vocab_size": 9}
    with torch.device("meta"):
        model = spec.build(resolve_args(spec, "debugmodel", sizes))
    settings = Float8Linear(**section)
    _, *lines = convert_to_float8(model, settings, num_shards=1, tp=1, compiled=False)
    assert len(lines) == (share is not None)
    assert all(line.startswith(f"{HARDLY_FASTER}: {share} of the work") for line in lines)


def test_a_filter_excludes_by_part_of_the_name():
    model, lines = convert(filter_fqns=["attention.wk", "layers.1", "nowhere"])
    assert converted(model) == {f"layers.0.{name}" for name in LINEARS if name != "attention.wk"}
    assert (
        lines[-1]
        == "quantize.linear.float8.filter_fqns: no name of a linear layer contains 'nowhere'"
    )


def test_dimensions_are_multiples_of_16_on_each_rank_of_a_tensor_parallel_group():
    assert converted(convert(tp=2)[0]) == in_both_blocks(*LINEARS)
    assert converted(convert(tp=4)[0]) == in_both_blocks(
        *(LINEARS.keys() - {"attention.wk", "attention.wv"})
    )
    assert converted(convert(tp=8)[0]) == set()


def test_only_evenly_sharded_weights_are_gathered_in_float8():
    def gathered(num_shards):
        model, lines = convert(num_shards, enable_fsdp_float8_all_gather=True)
        weights = {
            name
            for name, p in model.named_parameters()
            if type(p).__name__.startswith("WeightWith")
        }
        return {name.removesuffix(".weight") for name in weights}, lines[-1]

    assert gathered(2)[0] == in_both_blocks(*LINEARS)
    names, line = gathered(3)
    assert names == in_both_blocks("feed_forward.w1", "feed_forward.w3")
    assert line == (
        "Not gathered in float8, because 3 ranks do not divide the rows: layers.*.attention.wk, "
        "layers.*.attention.wo, layers.*.attention.wq, layers.*.attention.wv, layers.*.feed_forward.w2"
    )
    names, line = gathered(1)
    assert not names and line.endswith("no weight is sharded, so none is gathered")


# ---- precision of products


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_have_the_error_of_rounded_operands(recipe):
    """Operands have a relative error of at most 1/16 (e4m3, 3 mantissa bits) or 1/8 (e5m2, 2 bits).

    The errors of the terms of a product are independent. The relative error of the result is their
    root mean square, at most half of the bound.
    """
    torch.manual_seed(0)
    x = torch.randn(64, 96, requires_grad=True)
    exact = nn.Linear(96, 32, bias=False)
    narrow = nn.Sequential(nn.Linear(96, 32, bias=False))
    narrow[0].weight = nn.Parameter(exact.weight.detach().clone())
    settings = Float8Linear(**SMALL_TOO, recipe_name=recipe)
    convert_to_float8(narrow, settings, num_shards=1, tp=1, compiled=False)
    grad = torch.randn(64, 32)

    def forward_backward(layer, weight):
        x.grad = None
        y = layer(x)
        y.backward(grad)
        return {"output": y.detach(), "d_input": x.grad.clone(), "d_weight": weight.grad}

    actual, expected = (
        forward_backward(narrow, narrow[0].weight),
        forward_backward(exact, exact.weight),
    )
    errors = {
        name: ((actual[name] - expected[name]).norm() / expected[name].norm()).item()
        for name in expected
    }
    for name, error in errors.items():
        rounded = not (recipe == "rowwise_with_gw_hp" and name == "d_weight")
        low, high = (0.01, 0.09) if rounded else (0.0, 1e-6)
        assert low <= error <= high, (name, error)


def test_importing_float8_loads_no_torch():
    code = "import sys, torchtitan_like.distributed.float8 as f; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- kernels on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < FLOAT8_CAPABILITY,
    reason="needs a GPU with float8 kernels (compute capability 8.9 or later)",
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_equal_the_emulation(recipe):
    """Bfloat16 results agree to a few of their 8 bits.

    The operands are rounded equally. Kernels sum in another order, partly with fewer bits (fast
    accumulation).
    """
    torch.manual_seed(0)
    device = torch.device("cuda")
    x, grad = torch.randn(2, 64, 128, dtype=torch.bfloat16, device=device)

    def forward_backward(emulate):
        layer = nn.Sequential(nn.Linear(128, 128, bias=False, dtype=torch.bfloat16, device=device))
        torch.manual_seed(1)
        nn.init.normal_(layer[0].weight)
        settings = Float8Linear(emulate=emulate, filter_fqns=[], recipe_name=recipe)
        convert_to_float8(layer, settings, num_shards=1, tp=1, compiled=False)
        y = layer(x)
        y.backward(grad)
        return y.detach().float(), layer[0].weight.grad.float()

    for actual, expected in zip(forward_backward(False), forward_backward(True), strict=True):
        assert (actual - expected).norm() / expected.norm() <= 2e-2


@pytest.mark.parametrize("is_printed", [False, True])
def test_the_converted_model_can_be_printed(is_printed):
    spec = get_spec("llama3")
    args = resolve_args(spec, "debugmodel", {"dim": 64, "n_layers": 1, "n_heads": 4})
    with torch.device("meta"):
        model = spec.build(args)
    training = Training(dtype="float32", mixed_precision_param="float32")
    sections = Sections(
        training,
        Parallelism(data_parallel_shard_degree=1),
        ActivationCheckpoint(mode="none"),
        Compile(),
        [float8.FLOAT8],
        Float8Linear(**SMALL_TOO),
        print_after_conversion=is_printed,
    )
    world = SimpleNamespace(dims=ParallelDims(1), mesh=None, experts_mesh=None)
    exchange = RowExchange(False, 1.0, torch.device("cpu"))
    text = "\n".join(parallelize(model, spec, world, sections, exchange))
    assert ("Model definition after conversion:" in text) is is_printed
    assert ("(wq): Float8Linear" in text) is is_printed
