"""Model specs: registration, flavors and tables, without torch."""

import dataclasses
import subprocess
import sys
from fnmatch import fnmatchcase

import pytest

from torchtitan_like.models import InitRule, get_spec, register, resolve_args
from torchtitan_like.models import spec as spec_module
from torchtitan_like.models.spec import fit_positions

LLAMA = get_spec("llama3")


def test_sizes_need_no_torch():
    program = (
        "import sys; from torchtitan_like.models import get_spec, resolve_args\n"
        "spec = get_spec('llama3'); args = resolve_args(spec, '8B', {'n_layers': 2})\n"
        "spec.num_params(args), spec.flops_per_token(args, 8192), spec.init_table(args), spec.hf_config(args)\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "False False"


def test_an_unknown_model_is_refused_with_the_nearest_name():
    with pytest.raises(KeyError, match='lama3.* does not exist .did you mean "llama3"'):
        get_spec("lama3")


def test_a_name_can_be_registered_only_once(monkeypatch):
    monkeypatch.setattr(spec_module, "_registered", {})
    spec = dataclasses.replace(LLAMA, name="my_model")
    register(spec)
    register(spec)
    assert get_spec("my_model") is spec
    with pytest.raises(ValueError, match="'my_model' is already registered"):
        register(dataclasses.replace(LLAMA, name="my_model"))


def test_overrides_replace_sizes_of_the_flavor():
    args = resolve_args(
        LLAMA, "8B", {"n_layers": 2, "rope_theta": 10000, "n_kv_heads": None, "init_std": 0.01}
    )
    assert (args.dim, args.n_layers, args.rope_theta, args.num_kv_heads, args.linear_std) == (
        4096,
        2,
        10000,
        32,
        0.01,
    )


@pytest.mark.parametrize(
    ("flavor", "overrides", "expected"),
    [
        ("8b", {}, "no flavor '8b' (did you mean \"8B\"?)"),
        (
            "8B",
            {"n_layer": 2},
            'n_layer = 2: llama3 has no such argument (did you mean "n_layers"?)',
        ),
        ("8B", {"n_layers": "2"}, "n_layers = '2': expected int, found str"),
        ("8B", {"n_layers": True}, "n_layers = True: expected int, found bool"),
        ("8B", {"n_layers": 2.0}, "n_layers = 2.0: expected int, found float"),
        ("8B", {"depth_init": 1}, "depth_init = 1: expected bool, found int"),
        ("8B", {"n_kv_heads": 1.5}, "n_kv_heads = 1.5: expected int or nothing, found float"),
        ("8B", {"n_layers": 0}, "n_layers = 0: expected a number above 0"),
        ("8B", {"n_layers": 10**9}, "n_layers = 1000000000: expected at most 10000"),
        (
            "8B",
            {"vocab_size": 2**60},
            "vocab_size = 1152921504606846976: expected at most 2147483647",
        ),
        ("8B", {"dim": 2**26}, " parameters: expected at most 1,000,000,000,000,000"),
        ("8B", {"n_kv_heads": 5}, "n_kv_heads = 5: expected a divisor of n_heads = 32"),
        ("8B", {"dim": 4097}, "dim = 4097: expected a multiple of 2 x n_heads = 64"),
        (
            "8B",
            {"init_std": "sqrt(h)"},
            "init_std = 'sqrt(h)': expected a number or one of fixed, sqrt(1/(3h))",
        ),
        ("8B", {"init_std": 0}, "init_std = 0: expected a number above 0"),
        (
            "8B",
            {"ffn_dim_multiplier": -1.0},
            "ffn_dim_multiplier = -1.0: expected a number above 0",
        ),
        (
            "8B",
            {"rope_low_freq_factor": 9.0},
            "rope_high_freq_factor = 4.0: expected a number above rope_low_freq_factor = 9.0",
        ),
        ("8B", {"n_kv_heads": 0}, "n_kv_heads = 0: expected a number above 0"),
    ],
)
def test_an_invalid_size_is_reported(flavor, overrides, expected):
    with pytest.raises(ValueError) as error:
        resolve_args(LLAMA, flavor, overrides)
    assert expected in str(error.value)


def test_all_invalid_sizes_are_reported_together():
    with pytest.raises(ValueError) as error:
        resolve_args(LLAMA, "9B", {"dims": 1, "n_layers": "x", "norm_eps": None})
    assert len(str(error.value).splitlines()) == 4


@pytest.mark.parametrize(
    "arguments",
    [("normal", 0.0, 0.0), ("trunc_normal", 1.0, 0.0), ("normal", 1.0, 2.0), ("ones", 0.0, 1.0)],
)
def test_a_malformed_init_rule_is_refused(arguments):
    with pytest.raises(ValueError, match="InitRule"):
        InitRule(*arguments)


def test_a_sharding_role_must_exist():
    with pytest.raises(ValueError, match="unknown sharding roles \\['colum'\\]"):
        dataclasses.replace(LLAMA, sharding=(("output.weight", "colum"),))


@pytest.mark.parametrize("overrides", [{}, {"enable_weight_tying": True}, {"n_kv_heads": 4}])
def test_every_parameter_has_one_role_and_one_rule(overrides):
    import torch

    args = resolve_args(LLAMA, "debugmodel", overrides)
    with torch.device("meta"):
        model = LLAMA.build(args)
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        assert sum(fnmatchcase(name, pattern) for pattern, _ in LLAMA.sharding) == 1, name
        assert any(fnmatchcase(name, pattern) for pattern, _ in LLAMA.init_table(args)), name


def test_every_pattern_matches_a_parameter():
    """`llama3`, `qwen3`, and `hf` share one table of sharding roles."""
    import torch

    models = (
        ("llama3", "debugmodel", {}),
        ("qwen3", "debugmodel_moe_small", {}),
        ("hf", "llama", {"n_layers": 1, "mlp_bias": True}),
    )
    shared = set()
    for name, flavor, overrides in models:
        spec = get_spec(name)
        args = resolve_args(spec, flavor, overrides)
        with torch.device("meta"):
            names = {name for name, _ in spec.build(args).named_parameters()}
        for pattern, _ in spec.init_table(args):
            assert any(fnmatchcase(name, pattern) for name in names), pattern
        shared |= names
    for pattern, _ in LLAMA.sharding:
        assert any(fnmatchcase(name, pattern) for name in shared), pattern


def test_constraints_and_ties():
    args = resolve_args(LLAMA, "8B", {})
    assert LLAMA.constraints(args) == {
        "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "max_seq_len": 131072,
        "ffn_dim": 14336,
    }  # fmt: skip
    assert LLAMA.tied(args) == ()
    assert LLAMA.tied(resolve_args(LLAMA, "1B", {})) == (
        ("output.weight", "tok_embeddings.weight"),
    )


def test_fit_positions_sets_the_length_of_rotary_tables():
    spec = get_spec("llama3")
    args = resolve_args(spec, "debugmodel", {})
    assert fit_positions(args, 512) == dataclasses.replace(args, max_seq_len=512)

    @dataclasses.dataclass(frozen=True)
    class WithoutPositions:
        dim: int = 4

    assert fit_positions(WithoutPositions(), 512) == WithoutPositions()
