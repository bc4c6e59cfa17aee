"""Attention kernels equal a plain softmax in float64. Unsupported combinations are refused."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from torchtitan_like.build import log_attention
from torchtitan_like.config.loader import load_config
from torchtitan_like.models import get_spec, resolve_args
from torchtitan_like.models.argument_rules import (
    BACKENDS,
    unsupported_attention,
    unsupported_backend,
)
from torchtitan_like.models.layers import kernels
from torchtitan_like.models.layers.kernels import (
    KERNELS,
    Kernel,
    additive_mask,
    attention_kernel,
    causal_attention,
)
from torchtitan_like.step import Feed

LLAMA = get_spec("llama3")
# Relative L2 error: a few roundings of 6e-8 (fp32) and 2e-3 (bf16) in forward and backward.
TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}
BLOCK_CAUSAL = {"attn_mask_type": "block_causal"}


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def tensors(dtype=torch.float32, *, kv_heads=2, queries=24, keys=24, head_dim=16, device="cpu"):
    """Return random q, k, v and a gradient of the output."""
    torch.manual_seed(0)
    shapes = [(4, queries), (kv_heads, keys), (kv_heads, keys), (4, queries)]
    return [
        torch.randn(2, heads, seq, head_dim, dtype=torch.float64).to(device, dtype)
        for heads, seq in shapes
    ]


def some_positions(seq=24, device="cpu"):
    """Return the positions of two samples with different documents, some of one token."""
    lengths = [(7, 1, 1, 9, seq - 18), (seq - 5, 5)]
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]).to(device)


def plain(q, k, v, sees):
    """softmax(q k^T / sqrt(d)) v in float64 where `sees` (batch, 1, queries, keys) is true."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v


def visible(positions, keys):
    """Return which keys each query sees: the keys of its document, up to its own position."""
    batch, queries = positions.shape
    sees = torch.zeros(batch, 1, queries, keys, dtype=torch.bool)
    for row in range(batch):
        for query in range(queries):
            index = keys - queries + query
            sees[row, 0, query, index - int(positions[row, query]) : index + 1] = True
    return sees


def with_gradients(attention, q, k, v, grad):
    """Return the output and the gradients of q, k, v."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    out.backward(grad.to(out.dtype))
    return out.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("queries", [24, 16, 1])
def test_queries_are_at_the_last_positions_of_the_keys(dtype, kv_heads, queries):
    q, k, v, grad = tensors(dtype, kv_heads=kv_heads, queries=queries)
    sees = torch.ones(queries, 24, dtype=torch.bool).tril(24 - queries)
    actual = with_gradients(causal_attention, q, k, v, grad)
    expected = with_gradients(
        lambda *qkv: plain(*qkv, sees), *(x.double() for x in (q, k, v)), grad
    )
    assert all(relative(a, b) < TOLERANCES[dtype] for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("queries", [24, 10])
def test_attention_ends_at_document_borders(dtype, kv_heads, queries):
    q, k, v, grad = tensors(dtype, kv_heads=kv_heads, queries=queries)
    positions = some_positions()[:, 24 - queries :]
    mask = additive_mask(positions, dtype, 24)
    actual = with_gradients(lambda *qkv: causal_attention(*qkv, mask), q, k, v, grad)
    sees = visible(positions, 24)
    expected = with_gradients(
        lambda *qkv: plain(*qkv, sees), *(x.double() for x in (q, k, v)), grad
    )
    assert all(relative(a, b) < TOLERANCES[dtype] for a, b in zip(actual, expected, strict=True))
    assert torch.equal(mask == 0, sees) and set(mask.unique().tolist()) == {0.0, -torch.inf}


class Kernels(TorchDispatchMode):
    """Record the names of attention operators, and whether they get a mask."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if "attention" in name or "softmax" in name:
            self.calls.append((name, (kwargs or {}).get("attn_mask") is not None))
        return function(*args, **(kwargs or {}))


def test_every_case_uses_the_flash_kernel():
    q, k, v, _ = tensors()
    with Kernels() as log:
        causal_attention(q, k, v)
        causal_attention(q[:, :, 12:], k, v)
        causal_attention(q, k, v, additive_mask(some_positions(), q.dtype, 24))
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    assert log.calls == [(flash, False), (flash, True), (flash, True)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("compiles", "rows", "queries"),
    [*itertools.product([False], [2, 1], [24, 10]), (True, 2, 24), (True, 1, 10)],
)
def test_flex_equals_sdpa(compiles, rows, queries):
    """Flex attention has no backward pass on CPU. One row of positions stands for both samples."""
    torch.compiler.reset()
    q, k, v, _ = tensors(queries=queries)
    positions = some_positions()[:rows, 24 - queries :]
    core, mask = KERNELS["flex"]

    def windowed(q, k, v):
        return core(q, k, v, mask(positions, q.dtype, 24, window=5))

    attention = (
        torch.compile(windowed, backend="aot_eager", fullgraph=True) if compiles else windowed
    )
    expected = causal_attention(q, k, v, additive_mask(positions, q.dtype, 24, window=5))
    assert relative(attention(q, k, v), expected) < 1e-6
    assert torch.equal(core(q, k, v), causal_attention(q, k, v))


def varlen_reference(q, k, v, borders_q, borders_k, max_q, max_k, *, window_size):
    """Reference of `varlen_attn` as a loop. Tensors are (tokens, heads, head_dim)."""
    assert (
        torch.equal(borders_q, borders_k)
        and borders_q.dtype == torch.int32
        and window_size == (-1, 0)
    )
    assert borders_q[0] == 0 and borders_q[-1] == len(q)
    assert int(borders_q.diff().min()) >= 0 and int(borders_q.diff().max()) <= max_q == max_k
    out = torch.full_like(q, torch.nan)
    for start, end in itertools.pairwise(borders_q.tolist()):
        segment = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out[start:end] = causal_attention(*segment).squeeze(0).transpose(0, 1)
    return out


def test_varlen_gets_one_sequence_per_document(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_reference)
    q, k, v, _ = tensors()
    core, mask = KERNELS["varlen"]
    borders = mask(some_positions(), q.dtype, 24)
    # The bound of 8 is the next power of two: the last document is empty.
    assert borders.tolist() == [0, 7, 8, 9, 18, 24, 43, 48, 48]
    expected = causal_attention(q, k, v, additive_mask(some_positions(), q.dtype, 24))
    assert relative(core(q, k, v, borders), expected) < 1e-6
    assert torch.equal(core(q, k, v), causal_attention(q, k, v))
    with pytest.raises(ValueError, match="10 queries for 24 keys"):
        mask(some_positions()[:, :10], q.dtype, 24)


class HostReads(TorchDispatchMode):
    """Record the operators with which the host reads a tensor of `device`."""

    def __init__(self, device):
        super().__init__()
        self.device = torch.device(device)
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        reads = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "_unique2")
        if name in reads and args[0].device == self.device:
            self.calls.append(name)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("micro", [0, slice(None)])
def test_document_borders_do_not_wait_for_the_device(micro):
    """Tensors on `meta`, which have no values, stand for those of a device."""
    positions = some_positions().repeat(3, 1, 1)  # three micro-batches, in a pipeline all at once
    batch: Any = SimpleNamespace(tokens=positions, labels=positions, positions=positions)
    world: Any = SimpleNamespace(to_device=lambda x: x.to("meta"))
    feed = Feed(world, None)

    def model(tokens, labels, positions):
        return KERNELS["varlen"].mask(positions[:2], torch.bfloat16, 24)

    with HostReads("meta") as log:
        borders = feed.run(model, batch, feed.shard(batch), micro)
    assert log.calls == [] and borders.device.type == "meta"
    assert len(borders) == (9 if micro == 0 else 33)
    assert kernels._host_positions is None
    with HostReads("cpu") as log:  # without positions on the host
        assert len(KERNELS["varlen"].mask(some_positions(), torch.bfloat16, 24)) == 9
    assert log.calls == ["_local_scalar_dense"]


@pytest.mark.parametrize("num_documents", [1, 2, 3, 4, 5, 24])
def test_document_borders_have_all_documents(num_documents):
    """All documents except the last one have one token."""
    positions = (torch.arange(24) - num_documents + 1).clamp(min=0)
    borders = KERNELS["varlen"].mask(positions[None], torch.bfloat16, 24).tolist()
    assert borders[:num_documents] == list(range(num_documents))
    assert set(borders[num_documents:]) == {24} and len(borders) - 1 < 2 * num_documents


# ---- in a model


def tiny(**overrides):
    sizes = {
        "dim": 32,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 2,
        "vocab_size": 64,
        "max_seq_len": 32,
    }
    torch.manual_seed(0)
    model = LLAMA.build(resolve_args(LLAMA, "debugmodel", {**sizes, **overrides}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.double()


def test_documents_do_not_affect_each_other():
    model, positions = tiny(**BLOCK_CAUSAL), some_positions()
    tokens = torch.randint(64, positions.shape)
    packed = model(tokens, positions=positions)
    for row in range(2):
        starts = [*(positions[row] == 0).nonzero().flatten().tolist(), 24]
        for start, end in zip(starts, starts[1:], strict=False):
            separate = model(tokens[row : row + 1, start:end])
            assert relative(packed[row, start:end], separate[0]) < 1e-12
    assert relative(packed, model(tokens)) > 0.1


def test_without_document_borders_positions_only_select_rotary_rows():
    model = tiny()
    tokens = torch.randint(64, (2, 24))
    positions = torch.arange(24).expand(2, 24)
    assert torch.equal(model(tokens, positions=positions), model(tokens))
    # Only distances between tokens matter.
    assert relative(model(tokens, positions=positions + 5), model(tokens)) < 1e-6
    assert relative(model(tokens, positions=some_positions()), model(tokens)) > 1e-3


def test_forward_makes_one_mask_in_the_dtype_of_the_activations(monkeypatch):
    model = tiny(**BLOCK_CAUSAL).bfloat16()
    masks, saved = [], []

    def mask(*args):
        masks.append(additive_mask(*args))
        return masks[-1]

    model.attention_mask = mask
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        model(torch.randint(64, (2, 24)), positions=some_positions())
    (only_mask,) = masks
    assert only_mask.dtype == torch.bfloat16
    square = [x for x in saved if x.shape[-2:] == (24, 24)]
    # Every layer saves the same memory for backward.
    assert len(square) == 3 and {x.data_ptr() for x in square} == {only_mask.data_ptr()}


@pytest.mark.parametrize("attn_type", ["sdpa", "flex"])
def test_blocks_with_a_mask_compile_without_graph_breaks(attn_type):
    model, positions = tiny(attn_type=attn_type, **BLOCK_CAUSAL), some_positions()
    tokens = torch.randint(64, positions.shape)
    with torch.set_grad_enabled(attn_type == "sdpa"):
        expected = model(tokens, positions=positions)
        for block in model.layers.values():
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        actual = model(tokens, positions=positions)
    assert relative(actual, expected) < 1e-12


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
def test_the_reference_replaces_gpu_kernels_on_cpu(attn_type):
    positions = some_positions()
    tokens = torch.randint(64, positions.shape)

    def train(name):
        model = tiny(attn_type=name, **BLOCK_CAUSAL)
        out = model(tokens, positions=positions)
        out.square().mean().backward()
        return [out, *(parameter.grad for parameter in model.parameters())]

    for actual, expected in zip(train(attn_type), train("sdpa"), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
def test_other_devices_use_the_selected_kernel(attn_type, monkeypatch):
    kernel = Kernel(lambda *_: f"{attn_type} core", lambda *_: f"{attn_type} mask")
    monkeypatch.setitem(KERNELS, attn_type, kernel)
    chosen, x = attention_kernel(attn_type), torch.empty(1, device="meta")
    assert (chosen.core(x, x, x, None), chosen.mask(x, x.dtype, 1)) == (
        kernel.core(),
        kernel.mask(),
    )


# ---- refused combinations


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"attn_type": "flash"}, "attn_type = 'flash': expected one of sdpa, flex, varlen"),
        (
            {"attn_mask_type": "full"},
            "attn_mask_type = 'full': expected one of causal, block_causal",
        ),
        (
            {"attn_type": "flex"},
            'attn_type = \'flex\': expected "sdpa" with attn_mask_type = "causal"',
        ),
    ],
)
def test_an_unsupported_combination_is_refused(overrides, message):
    with pytest.raises(ValueError) as refusal:
        resolve_args(LLAMA, "debugmodel", overrides)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("attn_type", "device_type", "dtype", "head_dim", "message"),
    [
        ("sdpa", "cpu", "float64", 5, ""),
        ("flex", "cpu", "float64", 64, ""),
        ("varlen", "cpu", "float32", 20, ""),
        ("flex", "cuda", "float32", 64, ""),
        ("flex", "cuda", "float64", 64, "no kernel for float64"),
        ("varlen", "cuda", "bfloat16", 64, ""),
        ("varlen", "cuda", "float32", 64, "half precision only, not in float32"),
        ("varlen", "cuda", "bfloat16", 20, "heads of 8, 16, ... 256 dimensions, not 20"),
        ("varlen", "cuda", "float16", 512, "not 512"),
    ],
)
def test_attention_that_a_device_cannot_compute_is_reported(
    attn_type, device_type, dtype, head_dim, message
):
    problem = unsupported_attention(
        attn_type, device_type=device_type, dtype=dtype, head_dim=head_dim
    )
    assert message in problem and bool(message) == bool(problem)


# ---- the backend of scaled_dot_product_attention


@pytest.fixture
def backend():
    yield kernels.select_backend
    kernels.select_backend("auto")


def operators(function):
    """Return the names of the attention operators that `function` runs."""
    names = set()

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if "attention" in str(op) or "softmax" in str(op):
                names.add(str(op).removeprefix("aten."))
            return op(*args, **(kwargs or {}))

    with Record():
        function()
    return names


FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mode", ["eager", "recomputed", "compiled"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("auto", {f"{FLASH}.default", f"{FLASH}_backward.default"}),
        ("flash", {f"{FLASH}.default", f"{FLASH}_backward.default"}),
        ("math", {"_safe_softmax.default", "_softmax_backward_data.default"}),
    ],
)
def test_the_selected_backend_computes_forward_and_backward(backend, name, expected, mode, masked):
    torch.compiler.reset()
    backend(name)
    q, k, v, grad = tensors()
    positions = some_positions()
    mask = additive_mask(positions, q.dtype, 24) if masked else None
    sees = visible(positions, 24) if masked else torch.ones(24, 24, dtype=torch.bool).tril()

    def attention(q, k, v):
        return causal_attention(q, k, v, mask)

    def recomputed(q, k, v):
        return checkpoint(attention, q, k, v, use_reentrant=False)

    modes = {
        "eager": attention,
        "recomputed": recomputed,
        "compiled": torch.compile(recomputed, backend="aot_eager", fullgraph=True),
    }
    actual = with_gradients(modes[mode], q, k, v, grad)
    reference = with_gradients(
        lambda *qkv: plain(*qkv, sees), *(x.double() for x in (q, k, v)), grad
    )
    for value, wanted in zip(actual, reference, strict=True):
        assert relative(value, wanted) <= TOLERANCES[torch.float32]
    if mode == "compiled":  # the modes of dispatch do not work with compiled functions
        eager = with_gradients(attention, q, k, v, grad)
        assert all(torch.equal(*pair) for pair in zip(actual, eager, strict=True))
        return
    used = operators(lambda: with_gradients(modes[mode], q, k, v, grad))
    assert used == expected


def test_a_backend_that_is_known_to_be_wrong_is_not_used(backend):
    """`meta` tensors stand for those of a GPU."""
    q, k, other_k = (torch.empty(1, 2, seq, 16, device="meta") for seq in (192, 192, 128))
    mask = torch.empty(1, 1, 192, 192, device="meta")
    without_cudnn = [name for name in BACKENDS if name != "cudnn"]
    assert kernels._backends(q, k, mask) == without_cudnn
    assert kernels._backends(q, k, None) == kernels._backends(q, other_k, mask) == list(BACKENDS)
    backend("cudnn")
    assert kernels._backends(q, k, mask) == ["cudnn"]


CPU = torch.device("cpu")


@pytest.mark.parametrize("options", [{}, {"is_masked": True}, {"has_all_queries": False}])
@pytest.mark.parametrize(
    ("name", "used"),
    [("auto", "flash"), ("flash", "flash"), ("math", "math"), ("cudnn", "")],
)
def test_torch_names_its_backend(backend, name, used, options):
    backend(name)
    choice = kernels.choose_backend((4, 2), 64, 16, torch.bfloat16, CPU, **options)
    assert choice == (used, ())
    q, k, v, _ = tensors(queries=12 if "has_all_queries" in options else 24)
    mask = additive_mask(some_positions(), q.dtype, 24) if "is_masked" in options else None
    if used == "flash":
        assert operators(lambda: causal_attention(q, k, v, mask)) == {f"{FLASH}.default"}


@pytest.mark.parametrize("message", ["No viable backend for", "No available kernel. Aborting"])
def test_no_backend_is_no_error(monkeypatch, message):
    def choose(*args, **options):
        raise RuntimeError(message)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    assert kernels.choose_backend((4, 2), 64, 16, torch.bfloat16, CPU).backend == ""


def logged_attention(caplog, line="", device="cpu"):
    """Return the log records of a model of 4 heads of 64 dimensions, with settings like "a.b=1"."""
    caplog.clear()
    caplog.set_level("INFO")
    config = load_config([f"--{each}" for each in line.split()])
    sizes = {"dim": 256, "n_heads": 4, **config.model.args}
    args = resolve_args(get_spec(config.model.name), config.model.flavor, sizes)
    run: Any = SimpleNamespace(args=args, config=config, max_seq_len=config.training.seq_len)
    log_attention(run, torch.device(device))
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_the_log_names_the_kernel_and_the_reasons_on_cpu(caplog):
    text = 'Attention: scaled_dot_product_attention by flash where it is {} (attn_type = "{}", {})'
    given = 'bfloat16, heads of 64, training.attention_backend = "auto"'
    causal = text.format("causal", "sdpa", given)
    assert logged_attention(caplog) == [("INFO", causal)]
    documents = "model.args.attn_type=flex model.args.attn_mask_type=block_causal"
    masked = text.format("masked", "flex", given)
    assert logged_attention(caplog, documents) == [("INFO", masked)]
    windows = "model.name=hf model.flavor=mistral model.args.sliding_window_size=64"
    ((_, line),) = logged_attention(
        caplog, f"{windows} model.args.head_dim=64 model.args.n_kv_heads=4"
    )
    assert "by flash where it is causal, flash where it is masked (" in line


CUDNN = kernels.Choice("cudnn", ("cudnn", "flash", "efficient", "math"))
FLOAT32 = "training.mixed_precision_param=float32"
FLEX = "model.args.attn_type=flex model.args.attn_mask_type=block_causal"


@pytest.mark.parametrize(
    ("line", "choice", "text", "warning"),
    [
        ("", CUDNN, "by cudnn (of cudnn, flash, efficient, math) where it is causal (", ""),
        (
            "model.args.n_heads=16",
            CUDNN,
            "heads of 16",
            "heads of 16 dimensions with zeros up to 64",
        ),
        ("training.attention_backend=cudnn model.args.n_heads=16", CUDNN, "by cudnn", ""),
        (FLOAT32, kernels.Choice("efficient"), "by efficient", "do not compute in float32: set"),
        ("", kernels.Choice("math"), "by math where", "only the math kernel computes heads of 64"),
        ("training.attention_backend=math", kernels.Choice("math"), "by math", ""),
        (FLEX, None, 'Attention: flex (attn_type = "flex", bfloat16, heads of 64, compute', ""),
        (f"{FLEX} model.args.dim=384", None, "flex", "heads of 96 dimensions with zeros up to 128"),
        (f"{FLEX} {FLOAT32}", None, "flex", "do not compute in float32"),
        (FLEX.replace("flex", "varlen"), None, "Attention: varlen (", ""),
    ],
)
def test_a_slow_kernel_of_a_gpu_gets_one_warning(monkeypatch, caplog, line, choice, text, warning):
    monkeypatch.setattr(kernels, "choose_backend", lambda *args, **options: choice)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    (level, message), *others = logged_attention(caplog, line, "cuda")
    assert level == "INFO" and text in message and message.endswith("compute capability 9.0)")
    assert len(others) == bool(warning)
    for level, message in others:
        assert level == "WARNING" and message.startswith("Attention is slow: ")
        assert warning in message


SUPPORTED = {
    "attn_type": "sdpa",
    "device_type": "cuda",
    "dtype": "bfloat16",
    "needs_mask": False,
    "is_ring": False,
}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("auto", {"attn_type": "flex", "is_ring": True, "dtype": "float64"}, ""),
        *((name, {}, "") for name in BACKENDS),
        *((name, {"device_type": "cpu", "dtype": "float64"}, "") for name in ("flash", "math")),
        ("cudnn", {"device_type": "cpu"}, "on CPU"),
        ("efficient", {"device_type": "cpu"}, "on CPU"),
        ("cudnn", {"dtype": "float32"}, "in float32"),
        ("flash", {"dtype": "float32"}, "in float32"),
        ("efficient", {"dtype": "float32"}, ""),
        ("flash", {"needs_mask": True}, "for masked attention"),
        ("flash", {"is_ring": True}, ""),
        ("cudnn", {"is_ring": True}, "with a ring"),
        ("math", {"attn_type": "flex"}, "has its own kernel"),
    ],
)
def test_a_backend_that_cannot_compute_attention_is_refused(name, changes, message):
    problem = unsupported_backend(name, **SUPPORTED | changes)
    assert message in problem and bool(message) == bool(problem)


@pytest.mark.parametrize(
    ("capability", "widest"),
    [((7, 5), 0), ((8, 0), 256), ((8, 9), 192), ((9, 0), 256), ((12, 0), 192)],
)
def test_a_compiled_model_can_ask_for_the_heads_of_the_flash_kernel(
    monkeypatch, capability, widest
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    ask = torch.compile(
        lambda x: x + kernels._widest_flash_head(0), backend="eager", fullgraph=True
    )
    torch.compiler.reset()
    assert ask(torch.zeros(1)) == widest


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_gpu_kernels_of_documents_equal_sdpa(attn_type, kv_heads):
    size = {"queries": 256, "keys": 256, "head_dim": 64}
    q, k, v, grad = tensors(torch.bfloat16, kv_heads=kv_heads, device="cuda", **size)
    positions = some_positions(256, "cuda")
    core, mask = KERNELS[attn_type]
    kernel_mask = mask(positions, q.dtype, 256)
    actual = with_gradients(lambda *qkv: core(*qkv, kernel_mask), q, k, v, grad)
    additive = additive_mask(positions, torch.float64, 256)
    expected = with_gradients(
        lambda *qkv: plain(*qkv, additive == 0), *(x.double() for x in (q, k, v)), grad.double()
    )
    assert all(relative(a, b) < 1e-2 for a, b in zip(actual, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 20])
def test_gpu_queries_are_at_the_last_positions_of_the_keys(dtype, head_dim):
    q, k, v, grad = tensors(dtype, queries=96, keys=256, head_dim=head_dim, device="cuda")
    sees = torch.ones(96, 256, dtype=torch.bool, device="cuda").tril(160)
    actual = with_gradients(causal_attention, q, k, v, grad)
    expected = with_gradients(
        lambda *qkv: plain(*qkv, sees), *(x.double() for x in (q, k, v)), grad.double()
    )
    assert all(relative(a, b) < 1e-2 for a, b in zip(actual, expected, strict=True))
    assert kernels._is_flash_possible(q, k, v) == (dtype == torch.bfloat16 and head_dim == 64)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_each_gpu_backend_equals_a_plain_softmax(backend, name, kv_heads):
    size = {"queries": 256, "keys": 256, "head_dim": 64}
    q, k, v, grad = tensors(torch.bfloat16, kv_heads=kv_heads, device="cuda", **size)
    sees = torch.ones(256, 256, dtype=torch.bool, device="cuda").tril()
    backend(name)
    used = kernels.choose_backend((4, kv_heads), 256, 64, torch.bfloat16, q.device).backend
    actual = with_gradients(causal_attention, q, k, v, grad)
    expected = with_gradients(
        lambda *qkv: plain(*qkv, sees), *(x.double() for x in (q, k, v)), grad.double()
    )
    assert used == name
    assert all(relative(a, b) < 1e-2 for a, b in zip(actual, expected, strict=True))
