"""Other models than Llama on every topology: the framework depends on no module names.

One model is registered from outside the package (tests/distributed/outside_model.py) and has no
distributed code. The other is Qwen3, which normalizes its queries and keys.
"""

import dataclasses
import functools
from fnmatch import fnmatchcase
from itertools import product
from unittest.mock import patch

import pytest
import torch

from tests.distributed import outside_model
from tests.distributed.parity import compare, options, run_cell
from tests.harness.rank_pool import run_ranks
from torchtitan_like.models import get_spec, resolve_args
from torchtitan_like.models import spec as spec_module
from torchtitan_like.models.hf_table import links

MODELS = {
    "outside": {
        "experimental.custom_import": "tests.distributed.outside_model",
        "model.name": "outside",
        "model.flavor": "tiny",
    },
    "qwen3": {
        "model.name": "qwen3",
        "model.args.n_kv_heads": 2,
        "model.args.head_dim": 16,
        "model.args.hidden_dim": 96,
        "model.args.enable_weight_tying": "false",
    },
}
LLAMA_ONLY = ("model.args.n_kv_heads", "model.args.multiple_of")
TP, PP, CP = (f"parallelism.{name}_parallel_degree" for name in ("tensor", "pipeline", "context"))
LESS = {f"parallelism.pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")}
LAYOUTS = {
    # name: (ranks, overrides); the global batch always has 8 samples
    "fsdp-2": (2, {"training.local_batch_size": 4}),
    "hsdp-2x2": (
        4,
        {"training.local_batch_size": 2, "parallelism.data_parallel_replicate_degree": 2},
    ),
    "tp-2": (2, {TP: 2}),
    "tp-2-compile": (2, {TP: 2, "compile.enable": "true", "compile.backend": "aot_eager"}),
    "tp-2-no-sp": (2, {TP: 2, "parallelism.enable_sequence_parallel": "false"}),
    "fsdp-2-tp-2": (4, {TP: 2, "training.local_batch_size": 4}),
    "pp-2": (2, {PP: 2, "parallelism.pipeline_parallel_schedule": "1F1B", **LESS}),
    "cp-2": (2, {CP: 2}),
}


def options_of(model, folder, dtype, **overrides):
    """Return `parity.options` without the arguments that only Llama has."""
    llama_options = options(folder, dtype)
    values = {
        key[2:]: value for key, value in zip(llama_options[::2], llama_options[1::2], strict=True)
    }
    shared = {key: value for key, value in values.items() if key not in LLAMA_ONLY}
    return [
        part
        for key, value in {**shared, **MODELS[model], **overrides}.items()
        for part in (f"--{key}", str(value))
    ]


@functools.cache
def reference(model, folder, dtype):
    (trace,) = run_ranks(run_cell, 1, options_of(model, f"{folder}/{model}-one-rank", dtype))
    return trace


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("outside")


EVERY_RUN = [
    *(("outside", layout) for layout in ("fsdp-2", "tp-2-no-sp", "pp-2", "cp-2")),
    *(("qwen3", layout) for layout in ("fsdp-2", "tp-2")),
]
CELLS = [
    pytest.param(*cell, marks=[] if cell in EVERY_RUN else pytest.mark.nightly)
    for cell in product(MODELS, LAYOUTS)
]


@pytest.mark.parametrize(("model", "layout"), CELLS)
def test_equals_one_rank(folder, model, layout):
    world_size, overrides = LAYOUTS[layout]
    expected = reference(model, folder, "float64")
    argv = options_of(model, str(folder / f"{model}-{layout}"), "float64", **overrides)
    compare(expected, run_ranks(run_cell, world_size, argv)[0], "float64")


def run_with_wrong_role(argv, model, wrong):
    """Run a cell of a model with one wrong row in its sharding table."""
    spec = get_spec(model)
    assert wrong[0] in dict(spec.sharding)
    mutated = dataclasses.replace(
        spec, sharding=tuple({**dict(spec.sharding), wrong[0]: wrong[1]}.items())
    )
    with patch.dict(spec_module._registered, {model: mutated}):
        return run_cell(argv)


@pytest.mark.parametrize(
    ("model", "wrong"),
    [
        ("qwen3", ("layers.*.attention.[qk]_norm.weight", "norm")),
        ("outside", ("h.*.ln.*", "head_norm")),
    ],
)
def test_wrong_sharding_role_fails_the_comparison(folder, model, wrong):
    """Without sequence parallelism inputs are replicated, so a wrong partial gradient shows."""
    world_size, overrides = LAYOUTS["tp-2-no-sp"]
    expected = reference(model, folder, "float32")
    argv = options_of(model, str(folder / f"{model}-wrong"), "float32", **overrides)
    cell = run_ranks(run_with_wrong_role, world_size, argv, model, wrong)[0]
    with pytest.raises(AssertionError, match="gradient of|grad_norm"):
        compare(expected, cell, "float32")


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_has_a_gradient(folder, model):
    """Zero gradients would make the parity tests meaningless."""
    for name, gradient in reference(model, folder, "float32").gradients[0].items():
        assert abs(gradient).max() > 0, name


def test_outside_model_matches_its_spec():
    spec = get_spec("outside")
    assert spec is outside_model.SPEC
    args = resolve_args(spec, "small", {"n_layers": 2})
    with torch.device("meta"):
        model = spec.build(args)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert spec.num_params(args) == sum(p.numel() for p in model.parameters())
    assert len(links(spec.hf_names(args), shapes)) == len(shapes)
    for name in shapes:
        assert sum(fnmatchcase(name, pattern) for pattern, _ in spec.sharding) == 1, name
    names = " ".join(shapes)
    assert not any(
        word in names
        for word in ("layers", "tok_embeddings", "attention", "feed_forward", "output", "norm")
    )
