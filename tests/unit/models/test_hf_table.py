"""Links between native and external tensors cover every element once and are invertible."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.hf_weights import permute_rows, to_external, to_native
from torchtitan_like.models import get_spec, resolve_args
from torchtitan_like.models.hf_table import Link, Row, external_shapes, links
from torchtitan_like.util.boxes import slices

LLAMA = get_spec("llama3")
SMALL = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 64,
    "multiple_of": 16,
}


def numbered(shapes):
    """Return one tensor per shape. All elements are different."""
    state, start = {}, 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        state[name] = torch.arange(start, start + count).view(shape)
        start += count
    return state


def assert_round_trip(rows, shapes, tied=()):
    row_links = links(rows, shapes, tied)
    state = numbered(shapes)
    external = to_external(row_links, state)
    stored = (
        torch.cat([tensor.flatten() for tensor in external.values()])
        if external
        else torch.empty(0)
    )
    expected = [state[name].flatten() for name in state if name not in dict(tied)]
    assert torch.equal(stored.sort().values, torch.cat(expected).sort().values), (
        "expected every element once"
    )
    assert sum(torch.Size([n for _, n, _ in link.native_box]).numel() for link in row_links) == len(
        stored
    )
    restored = to_native(row_links, external, state)
    assert all(torch.equal(restored[name], state[name]) for name in state if name not in dict(tied))
    assert all(step == 1 for link in row_links for _, _, step in link.native_box), (
        "expected native boxes without gaps"
    )
    return external


def test_a_plain_row_renames_a_tensor():
    actual = links((("a.{}.x", "b.{}.y"),), {"a.12.x": (3, 4)})
    assert actual == [
        Link("a.12.x", ((0, 3, 1), (0, 4, 1)), "b.12.y", ((0, 3, 1), (0, 4, 1)), False)
    ]


def test_interleaved_rows_equal_the_conversion_script_of_transformers():
    external = assert_round_trip((Row("wq", "wq", interleaved_heads=4),), {"wq": (48, 5)})
    assert torch.equal(permute_rows(external["wq"], 4), numbered({"wq": (48, 5)})["wq"])


def test_native_tensors_are_fused_in_the_order_of_the_row():
    shapes = {"0.w3": (3, 4), "0.w1": (2, 4)}
    external = assert_round_trip((Row(("{}.w1", "{}.w3"), "{}.gate_up"),), shapes)
    state = numbered(shapes)
    assert torch.equal(external["0.gate_up"], torch.cat([state["0.w1"], state["0.w3"]]))


def test_a_native_tensor_is_split_in_the_order_of_the_row():
    external = assert_round_trip((Row("wqkv", ("q", "k", "v"), sizes=(4, 2, 2)),), {"wqkv": (8, 3)})
    assert torch.equal(
        torch.cat([external[name] for name in "qkv"]), numbered({"wqkv": (8, 3)})["wqkv"]
    )


def test_stacked_experts_become_separate_tensors():
    external = assert_round_trip(
        (Row("l.{}.w1", "l.{}.experts.{e}.gate", transposed=True),), {"l.3.w1": (4, 2, 5)}
    )
    assert list(external) == [f"l.3.experts.{e}.gate" for e in range(4)]
    assert torch.equal(external["l.3.experts.2.gate"], numbered({"w": (4, 2, 5)})["w"][2].T)


def test_experts_are_fused_and_transposed():
    shapes = {"w1": (3, 2, 5), "w3": (3, 2, 5)}
    external = assert_round_trip((Row(("w1", "w3"), "gate_up", transposed=True, axis=1),), shapes)
    state = numbered(shapes)
    assert torch.equal(external["gate_up"], torch.cat([state["w1"].mT, state["w3"].mT], dim=-1))


def test_a_tied_name_is_skipped():
    rows, shapes = (
        (("head", "lm_head"), ("embedding", "embed")),
        {"head": (4, 2), "embedding": (4, 2)},
    )
    assert list(assert_round_trip(rows, shapes, (("head", "embedding"),))) == ["embed"]


def test_a_scalar_is_converted():
    assert assert_round_trip((("scale", "factor"),), {"scale": ()})["factor"].shape == ()


SIZES = st.integers(1, 5)


@st.composite
def tables(draw):
    """A table of one row, with the shapes of its tensors."""
    kind = draw(st.sampled_from(["plain", "interleaved", "split", "fused"]))
    stacked, transposed = draw(st.booleans()), draw(st.booleans())
    axis = draw(st.integers(int(stacked), 1 + int(stacked)))
    shape = [draw(SIZES) for _ in range(2 + stacked)]
    suffix = ".{e}" if stacked else ""
    common = {"axis": axis, "transposed": transposed}
    if kind == "interleaved":
        heads = draw(SIZES)
        shape[axis] = 2 * heads * draw(SIZES)
        return Row("a.{}", "b.{}" + suffix, interleaved_heads=heads, **common), {
            "a.7": tuple(shape)
        }
    parts = draw(st.lists(SIZES, min_size=1, max_size=3))
    if kind == "split":
        shape[axis] = sum(parts)
        names = tuple(f"b{i}.{{}}{suffix}" for i in range(len(parts)))
        return Row("a.{}", names, sizes=tuple(parts), **common), {"a.7": tuple(shape)}
    if kind == "fused":
        native_names = [f"a{i}.{{}}" for i in range(len(parts))]
        shapes = {
            f"a{i}.7": tuple(n if d == axis else s for d, s in enumerate(shape))
            for i, n in enumerate(parts)
        }
        return Row(tuple(native_names), "b.{}" + suffix, **common), shapes
    return Row("a.{}", "b.{}" + suffix, **common), {"a.7": tuple(shape)}


@settings(deadline=None, max_examples=200)
@given(tables())
def test_any_row_covers_every_element_once(table):
    row, shapes = table
    assert_round_trip((row,), shapes)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("a", ("b", "c")), "give as many sizes"),
        (("a", "b", (3,)), "give as many sizes"),
        ((("a", "d"), ("b", "c"), (1, 1)), "neither join several"),
        (("a", ("b.{e}", "c.{e}"), (1, 1)), "set axis"),
    ],
)
def test_a_malformed_row_is_refused(row, message):
    with pytest.raises(ValueError, match=message):
        Row(*row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row("a", "b", interleaved_heads=3), r"a \(8, 2\) does not hold 3 heads"),
        (Row("a", ("b", "c"), sizes=(4, 3)), r"a \(8, 2\) is not as long as its parts"),
    ],
)
def test_a_shape_that_does_not_fit_its_row_is_reported(row, message):
    with pytest.raises(ValueError, match=message):
        links((row,), {"a": (8, 2)})


@pytest.mark.parametrize("present", ["0.a", "0.b"])
def test_an_incomplete_external_tensor_is_refused(present):
    with pytest.raises(
        KeyError, match=f"{present} and .'0.[ab]'. together are one external tensor"
    ):
        links((Row(("{}.a", "{}.b"), "{}.ab"),), {present: (2, 3), "1.a": (1, 1), "1.b": (1, 1)})


def test_tensors_without_a_row_are_reported():
    with pytest.raises(KeyError, match="2 of 3 tensors.*bias.*layers.x.wq"):
        links((("layers.{}.wq", "q.{}"),), {"bias": (1,), "layers.x.wq": (1,), "layers.0.wq": (1,)})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("format", ["hf_names", "meta_names"])
def test_tables_of_llama_cover_every_parameter(format, tied):
    args = resolve_args(LLAMA, "debugmodel", SMALL | {"enable_weight_tying": tied})
    with torch.device("meta"):
        model = LLAMA.build(args)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    external = assert_round_trip(getattr(LLAMA, format)(args), shapes, LLAMA.tied(args))
    assert len(external) == len(shapes)
    if format == "meta_names":
        assert external.keys() == shapes.keys()
        for name, heads in (("wq", 4), ("wk", 2)):
            native = numbered(shapes)[f"layers.1.attention.{name}.weight"]
            assert torch.equal(
                permute_rows(external[f"layers.1.attention.{name}.weight"], heads), native
            )
        name = "layers.1.attention.wv.weight"
        assert torch.equal(external[name], numbered(shapes)[name])


def test_external_shapes_and_slices():
    row_links = links((Row("a", "b", transposed=True),), {"a": (2, 3)})
    assert external_shapes(row_links) == {"b": (3, 2)}
    assert slices(((1, 2, 2), (0, 3, 1))) == (slice(1, 5, 2), slice(0, 3, 1))


def test_links_need_no_torch():
    program = (
        "import sys; from torchtitan_like.models.hf_table import links\n"
        "from torchtitan_like.models import get_spec, resolve_args\n"
        "spec = get_spec('llama3'); args = resolve_args(spec, '8B', {})\n"
        "links(spec.meta_names(args), {'layers.0.attention.wq.weight': (4096, 4096)})\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "False False"
