"""Model specs: registration, flavors and tables, without torch."""

import dataclasses

import pytest

from torchtitan_like.models import InitRule, get_spec, register, resolve_args
from torchtitan_like.models import spec as spec_module
from torchtitan_like.models.spec import fit_positions

LLAMA = get_spec("llama3")


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
