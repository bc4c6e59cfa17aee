"""Tensor parallelism gives the loss and gradients of one rank, with the expected communication."""

import re
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.distributed.traffic import Traffic
from tests.harness.rank_pool import run_ranks
from torchtitan_like.config.sections_scale import ActivationCheckpoint
from torchtitan_like.distributed import tensor_parallel
from torchtitan_like.distributed.activation import apply_activation_checkpointing
from torchtitan_like.distributed.data_parallel import apply_data_parallel
from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.initialize import initialize, materialize, weight_hash
from torchtitan_like.distributed.parallelize import find_blocks
from torchtitan_like.distributed.tensor_parallel import apply_tensor_parallel
from torchtitan_like.distributed.views import on_local_parameters
from torchtitan_like.models.spec import InitRule, get_spec, resolve_args
from torchtitan_like.optim.clipping import gradient_norm
from torchtitan_like.optim.loss import VocabShards, chunked_cross_entropy

BATCH, SEQ = 4, 16
SIZES = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "vocab_size": 72,
    "max_seq_len": SEQ,
}
FLAVORS = {
    "llama3": ("debugmodel", {"multiple_of": 16}),
    "qwen3": ("0.6B", {"head_dim": 8, "hidden_dim": 48}),
}


@dataclass(frozen=True)
class Layout:
    """One cell: a layout with its options, and the tolerance of the comparison."""

    tp: int = 2
    dp: int = 1
    replicate: int = 1
    sequence_parallel: bool = True
    loss_parallel: bool = True
    model: str = "llama3"
    vocab_size: int = 72
    tied: bool = False
    dtype: str = "float64"
    checkpointing: str = "none"
    ac_option: str = "2"
    saves_scatters: bool = True
    backend: str = ""
    positions: bool = False
    biased: bool = False
    chunk_mib: int = 0
    tolerance: float = 1e-10

    @property
    def size(self):
        return self.tp * self.dp * self.replicate


def sizes(layout):
    flavor, others = FLAVORS[layout.model]
    overrides = (
        SIZES | others | {"vocab_size": layout.vocab_size, "enable_weight_tying": layout.tied}
    )
    return resolve_args(get_spec(layout.model), flavor, overrides)


def random_norm_spec(layout):
    """Return the model's spec with random norm weights and biases; ones would hide errors."""
    spec = get_spec(layout.model)
    table = [("*norm.weight", InitRule("normal", std=1.0)), ("*.bias", InitRule("normal", std=1.0))]
    return replace(
        spec,
        sharding=tuple((pattern.replace("weight", "*"), role) for pattern, role in spec.sharding),
        init_table=lambda args: (*table, *spec.init_table(args)),
    )


def build_on_meta(layout, dtype):
    with torch.device("meta"):
        model = get_spec(layout.model).build(sizes(layout))
        for module in model.layers.modules():
            if layout.biased and isinstance(module, torch.nn.Linear):
                module.bias = torch.nn.Parameter(torch.empty(module.out_features))
        return model.to(dtype)


def with_initial_weights(model, layout):
    """Allocate the model and initialize its weights."""
    materialize(model, torch.device("cpu"))
    initialize(model, random_norm_spec(layout).init_table(sizes(layout)), seed=7)
    return model


def batch(layout):
    """Return tokens, partly masked labels, and positions of two documents per sample.

    They are equal on every rank.
    """
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(layout.vocab_size, (2, BATCH, SEQ), generator=generator)
    labels[
        torch.rand(BATCH, SEQ, generator=generator) < torch.arange(1, BATCH + 1).unsqueeze(1) / 8
    ] = -100
    positions = torch.cat([torch.arange(5), torch.arange(SEQ - 5)]).repeat(BATCH, 1)
    return tokens, labels, positions if layout.positions else None


def results_of_one_rank(layout, dtype=torch.float64):
    """Return loss, gradients, logits and weight hash of the unsharded model."""
    model = with_initial_weights(build_on_meta(layout, dtype), layout)
    tokens, labels, positions = batch(layout)
    loss = model(tokens, labels, positions) / (labels != -100).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    with torch.no_grad():
        return loss.item(), gradients, model(tokens, None, positions), weight_hash(model)


def build_sharded(layout, mesh):
    """Build the model and shard it, like parallelize.py."""
    spec, dtype = random_norm_spec(layout), getattr(torch, layout.dtype)
    model = build_on_meta(layout, torch.float32 if dtype == torch.bfloat16 else dtype)
    shards = VocabShards(mesh["tp"].get_group(), layout.vocab_size)
    model.output.loss = chunked_cross_entropy(
        layout.chunk_mib, None, shards, gathers_logits=not layout.loss_parallel
    )
    apply_tensor_parallel(model, spec, mesh["tp"], sequence_parallel=layout.sequence_parallel)
    blocks = find_blocks(model, spec)
    section = ActivationCheckpoint(
        mode=layout.checkpointing,
        selective_ac_option=layout.ac_option,
        per_op_sac_save_reduce_scatter=layout.saves_scatters,
    )
    apply_activation_checkpointing(blocks, section)
    if layout.backend:
        for block in blocks.values():
            block.forward = on_local_parameters(
                block, torch.compile(block.forward, backend=layout.backend, fullgraph=True)
            )
    if layout.dp * layout.replicate > 1 or dtype == torch.bfloat16:
        reduce_dtype = "float64" if dtype == torch.float64 else "float32"
        dims = ParallelDims(
            layout.size, tp=layout.tp, dp_shard=layout.dp, dp_replicate=layout.replicate
        )
        apply_data_parallel(
            model, spec, blocks.values(), mesh, dims,
            param_dtype=layout.dtype, reduce_dtype=reduce_dtype, reshard="default",
            cpu_offload=False,
        )  # fmt: skip
    return with_initial_weights(model, layout)


def build_mesh(layout):
    names, shape = ("dp_shard", "tp"), (layout.dp, layout.tp)
    if layout.replicate > 1:
        names, shape = ("dp_replicate", *names), (layout.replicate, *shape)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def local_samples(layout, part):
    """Return the samples of this data-parallel rank."""
    num = layout.dp * layout.replicate
    return None if part is None else part.chunk(num)[dist.get_rank() // layout.tp % num]


def backward(model, layout):
    """Run forward and backward; return the summed loss of all samples."""
    tokens, labels, positions = batch(layout)
    share = (
        model(*(local_samples(layout, part) for part in (tokens, labels, positions)))
        / (labels != -100).sum()
    )
    share.backward()
    total = share.detach().double()
    dist.all_reduce(total)  # all ranks of a tensor-parallel group have the same loss
    return total.item() / layout.tp


def relative_error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def compare(layout):
    """Return the relative errors of loss, logits, norm and each gradient."""
    mesh = build_mesh(layout)
    model = build_sharded(layout, mesh)
    hashes = [None] * layout.size
    dist.all_gather_object(hashes, weight_hash(model))
    expected_loss, expected, expected_logits, expected_hash = results_of_one_rank(layout)
    if layout.dtype == "float64":
        assert sum(hashes) % 2**64 == expected_hash
    named = list(model.named_parameters())  # an optimizer also reads them before the first forward
    errors = {"loss": abs(backward(model, layout) / expected_loss - 1)}
    for name, p in named:
        assert p.is_leaf and p.grad is not None, name
        assert p.grad.placements == p.placements and p.grad.dtype == p.dtype, name
        errors[name] = relative_error(p.grad.full_tensor(), expected[name])
    assert expected.keys() == dict(named).keys()
    assert all(p is q for (_, p), q in zip(named, model.parameters(), strict=True))
    norm = gradient_norm([p for _, p in named], dist.group.WORLD)
    errors["norm"] = relative_error(norm, torch.stack([g.norm() for g in expected.values()]).norm())
    tokens, _, positions = batch(layout)
    with torch.no_grad():
        logits = model(local_samples(layout, tokens), None, local_samples(layout, positions))
    errors["logits"] = relative_error(logits, local_samples(layout, expected_logits))
    return errors


def norm_of_parameters_on_equal_meshes():
    """Return the norm of two parameters.

    On ranks 2 and 3 they are on two equal meshes, on ranks 0 and 1 on the same mesh.
    """
    older, newer = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp")) for _ in range(2)
    )
    parameters = []
    for mesh in (newer, older if dist.get_rank() >= 2 else newer):
        # The gradient is not the result of an operation, which could select either mesh.
        local = torch.full((1, 1), 2.0)
        tensors = [
            DTensor.from_local(local.clone(), mesh, (Shard(0), Shard(1)), run_check=False)
            for _ in range(2)
        ]
        parameters.append(nn.Parameter(tensors[0]))
        parameters[-1].grad = tensors[1]
    return gradient_norm(parameters, dist.group.WORLD).item()


def test_gradient_norm_treats_equal_meshes_as_one():
    """In a pipeline, first and last stages have other meshes in DTensor's caches than others."""
    assert run_ranks(norm_of_parameters_on_equal_meshes, 4, timeout=20) == pytest.approx(
        [32**0.5] * 4
    )


LAYOUTS = {
    "tp-2": Layout(),
    "tp-2-no-sp": Layout(sequence_parallel=False),
    "tp-4": Layout(tp=4),
    "tp-4-no-sp": Layout(tp=4, sequence_parallel=False),
    "tp-2-logits-gathered": Layout(loss_parallel=False),
    "tp-2-no-sp-logits-gathered": Layout(sequence_parallel=False, loss_parallel=False),
    "tp-4-uneven": Layout(tp=4, vocab_size=71),
    "tp-4-uneven-logits-gathered": Layout(tp=4, vocab_size=71, loss_parallel=False),
    "tp-2-positions": Layout(positions=True),
    "tp-2-chunked-loss": Layout(vocab_size=2051, chunk_mib=1),
    "fsdp-2-tp-2": Layout(dp=2),
    "fsdp-2-tp-2-no-sp": Layout(dp=2, sequence_parallel=False),
    "fsdp-2-tp-2-uneven": Layout(dp=2, vocab_size=71),
    "tp-2-tied": Layout(tied=True),
    "tp-2-tied-no-sp": Layout(tied=True, sequence_parallel=False),
    "fsdp-2-tp-2-tied-uneven": Layout(dp=2, tied=True, vocab_size=71),
    "ddp-2-tp-2": Layout(replicate=2),
    "tp-2-biased": Layout(biased=True),
    "tp-2-biased-no-sp": Layout(biased=True, sequence_parallel=False),
    "tp-2-qwen3": Layout(model="qwen3"),
    "tp-2-qwen3-no-sp": Layout(model="qwen3", sequence_parallel=False),
    "fsdp-2-tp-2-qwen3": Layout(dp=2, model="qwen3"),
    "tp-2-ac-full": Layout(checkpointing="full"),
    "tp-2-ac-per-op": Layout(checkpointing="selective", ac_option="op"),
    "fsdp-2-tp-2-ac-full": Layout(dp=2, checkpointing="full"),
    "tp-2-compile-ac-full": Layout(backend="aot_eager", checkpointing="full"),
    "tp-2-compile-ac-per-op": Layout(
        backend="aot_eager", checkpointing="selective", ac_option="op"
    ),
    "tp-2-fp32": Layout(dtype="float32", tolerance=1e-5),
}


# test_matrix.py trains with FSDP and TP in every run.
NIGHTLY = {
    "tp-4",
    "tp-4-no-sp",
    "tp-4-uneven-logits-gathered",
    "fsdp-2-tp-2",
    "fsdp-2-tp-2-no-sp",
    "fsdp-2-tp-2-uneven",
    "ddp-2-tp-2",
    "fsdp-2-tp-2-qwen3",
    "fsdp-2-tp-2-ac-full",
    "tp-2-compile-ac-full",
    "tp-2-compile-ac-per-op",
}
CELLS = [
    pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else []) for name in LAYOUTS
]


@pytest.mark.parametrize("name", CELLS)
def test_equals_one_rank(name):
    layout = LAYOUTS[name]
    for errors in run_ranks(compare, layout.size, layout, timeout=120):
        wrong = {key: error for key, error in errors.items() if not error <= layout.tolerance}
        assert not wrong


def bf16_errors(layout):
    """Return bf16 errors of loss and gradients relative to float64: sharded, and on one rank."""
    loss, gradients, _, _ = results_of_one_rank(layout)
    plain_loss, plain, _, _ = results_of_one_rank(layout, torch.bfloat16)
    model = build_sharded(layout, build_mesh(layout))
    errors = {"loss": (abs(backward(model, layout) / loss - 1), abs(plain_loss / loss - 1))}
    for name, p in model.named_parameters():
        errors[name] = (
            relative_error(p.grad.full_tensor(), gradients[name]),
            relative_error(plain[name], gradients[name]),
        )
    return errors


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_bf16_errors_are_close_to_one_rank(sequence_parallel):
    """Computation in bf16, with fp32 weights and fp32 data-parallel reductions.

    Gradients of one rank have errors of 0.3% to 1.2%. Matrix gradients of two ranks may have a
    quarter more, because the sum over ranks is rounded too. Norm gradients have only 32 elements,
    so their errors vary more.
    """
    layout = Layout(dp=2, dtype="bfloat16", sequence_parallel=sequence_parallel)
    for errors in run_ranks(bf16_errors, layout.size, layout):
        loss, one_rank_loss = errors.pop("loss")
        assert loss <= one_rank_loss + 1e-3
        for name, (error, one_rank_error) in errors.items():
            assert error <= (2.0 if "norm" in name else 1.25) * one_rank_error, name


# Each change of a role's rule makes at least the gradient of the named parameter wrong.
MUTATIONS = {
    "norms are partial": (
        "norm", {"partial_gradient": "never"}, Layout(), "layers.0.attention_norm.weight",
    ),
    "the final norm is partial": ("norm", {"partial_gradient": "never"}, Layout(), "norm.weight"),
    "norms are not partial without sequence parallelism": (
        "norm", {"partial_gradient": "always"}, Layout(sequence_parallel=False), "norm.weight",
    ),
    "norms in heads are partial": (
        "head_norm", {"partial_gradient": "never"}, Layout(model="qwen3", sequence_parallel=False),
        "layers.1.attention.q_norm.weight",
    ),
    "norms in heads are partial with sequence parallelism": (
        "head_norm", {"partial_gradient": "never"}, Layout(model="qwen3"),
        "layers.1.attention.k_norm.weight",
    ),
    "column inputs are gathered": (
        "column", {"gather_input": None}, Layout(sequence_parallel=False),
        "layers.0.attention_norm.weight",
    ),
    "the input of the head is gathered": (
        "output", {"gather_input": None}, Layout(sequence_parallel=False), "norm.weight",
    ),
    "row outputs are reduced": (
        "row", {"output": None}, Layout(sequence_parallel=False), "layers.0.feed_forward.w2.weight",
    ),
}  # fmt: skip


def compare_mutated(layout, role, change):
    original = tensor_parallel.RULES[role]
    tensor_parallel.RULES[role] = original._replace(**change)
    try:
        return compare(layout)
    finally:
        tensor_parallel.RULES[role] = original


@pytest.mark.parametrize("name", MUTATIONS)
def test_changed_sharding_rule_makes_a_gradient_wrong(name):
    role, change, layout, parameter = MUTATIONS[name]
    for errors in run_ranks(compare_mutated, layout.size, layout, role, change):
        assert errors[parameter] > 1e-3


def traffic(layout):
    model = build_sharded(layout, build_mesh(layout))
    tokens, labels, _ = batch(layout)
    with Traffic() as forward:
        loss = model(tokens, labels)
    with Traffic() as backward_sizes:
        loss.backward()
    return forward.sizes(), backward_sizes.sizes()


L, ACTIVATION, TOKENS, DIM = (
    SIZES["n_layers"],
    BATCH * SEQ * SIZES["dim"],
    BATCH * SEQ,
    SIZES["dim"],
)
# The largest logit of each token; then the sum of exponentials and the label's logit.
LOSS = {("all_reduce", TOKENS): 1, ("all_reduce", 2 * TOKENS): 1}
GATHER, SCATTER, SUM = (
    ("all_gather", ACTIVATION),
    ("reduce_scatter", ACTIVATION),
    ("all_reduce", ACTIVATION),
)


@pytest.mark.parametrize(
    ("layout", "forward", "backward_sizes"),
    [
        # Each block gathers before two groups of column layers and scatters after two row layers.
        # The head gathers and the embedding scatters. Backward swaps gathers and scatters.
        # The gradients of 2 L + 1 norms are reduced.
        (Layout(), {GATHER: 2 * L + 1, SCATTER: 2 * L + 1, **LOSS},
         {GATHER: 2 * L + 1, SCATTER: 2 * L + 1, ("all_reduce", DIM): 2 * L + 1}),
        # Row layers and the embedding all-reduce in forward; the inputs of column layers and of
        # the head in backward. An all-reduce sends as much as a scatter and a gather.
        (Layout(sequence_parallel=False), {SUM: 2 * L + 1, **LOSS}, {SUM: 2 * L + 1}),
        # Recomputation of a block repeats its communication.
        (Layout(checkpointing="full"), {GATHER: 2 * L + 1, SCATTER: 2 * L + 1, **LOSS},
         {GATHER: 4 * L + 1, SCATTER: 4 * L + 1, ("all_reduce", DIM): 2 * L + 1}),
        # Per-op checkpointing repeats gathers, and scatters only if their outputs are not saved.
        (Layout(checkpointing="selective", ac_option="op"),
         {GATHER: 2 * L + 1, SCATTER: 2 * L + 1, **LOSS},
         {GATHER: 4 * L + 1, SCATTER: 2 * L + 1, ("all_reduce", DIM): 2 * L + 1}),
        (Layout(checkpointing="selective", ac_option="op", saves_scatters=False),
         {GATHER: 2 * L + 1, SCATTER: 2 * L + 1, **LOSS},
         {GATHER: 4 * L + 1, SCATTER: 4 * L + 1, ("all_reduce", DIM): 2 * L + 1}),
        (Layout(loss_parallel=False),
         {GATHER: 2 * L + 1, SCATTER: 2 * L + 1, ("all_gather", TOKENS * 36): 1},
         {GATHER: 2 * L + 1, SCATTER: 2 * L + 1, ("all_reduce", DIM): 2 * L + 1}),
    ],
    ids=["sp", "no-sp", "sp-ac-full", "sp-ac-op", "sp-ac-op-scatters-repeated", "logits-gathered"],
)  # fmt: skip
def test_collectives_of_a_step(layout, forward, backward_sizes):
    assert run_ranks(traffic, 2, layout) == [(forward, backward_sizes)] * 2


def num_graphs():
    layout = Layout(backend="aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    backward(build_sharded(layout, build_mesh(layout)), layout)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_blocks_share_one_compilation():
    assert run_ranks(num_graphs, 2, timeout=120) == [1, 1]


def sharding_error(layout, sharding):
    """Return the error of a sharding table, and check that the model is unchanged."""
    spec = replace(get_spec(layout.model), sharding=sharding or get_spec(layout.model).sharding)
    model = build_on_meta(layout, torch.float32)
    before = list(model.parameters())
    try:
        apply_tensor_parallel(model, spec, build_mesh(layout)["tp"], sequence_parallel=True)
    except ValueError as error:
        assert all(p is q for p, q in zip(before, model.parameters(), strict=True))
        return str(error)


ROWS = get_spec("llama3").sharding


@pytest.mark.parametrize(
    ("layout", "sharding", "expected"),
    [
        (Layout(), ROWS[1:],
         r"^tok_embeddings.weight matches the rows \[\]: expected exactly one row"),
        (Layout(), (*ROWS, ("norm.*", "norm")),
         r"^norm.weight matches the rows \['norm', 'norm'\]"),
        (Layout(), (("norm.weight", "buffer_state"), *ROWS[:-2], ROWS[-1]),
         "^norm.weight has the role 'buffer_state'"),
        (Layout(tied=True), (*ROWS[:-1], ("output.weight", "row")),
         "^output.weight is tied to tok_embeddings.weight, but"),
        (Layout(vocab_size=1), None, "^output.weight: 1 entries leave some of 2 ranks without any"),
        (Layout(tp=3), None,
         "^layers.1.attention.wq.weight: 3 ranks do not divide its 32 features"),
    ],
    ids=["no row", "two rows", "unknown role", "tied weights with two roles",
         "too few entries", "features"],
)  # fmt: skip
def test_invalid_sharding_names_the_parameter(layout, sharding, expected):
    for message in run_ranks(sharding_error, layout.size, layout, sharding):
        assert re.search(expected, message or "", re.MULTILINE)


def errors_of_invalid_calls():
    layout = Layout()
    model = build_sharded(layout, build_mesh(layout))
    tokens, labels, _ = batch(layout)
    messages = []
    for call in (
        lambda: model(tokens + 72, labels),
        lambda: model.output(hidden=torch.zeros(1, 2, 32)),
    ):
        try:
            call()
        except (IndexError, TypeError) as error:
            messages.append(str(error))
    return messages


def test_every_rank_raises_the_errors_of_one_rank():
    """Tokens outside the vocabulary and keyword arguments of the head are errors on all ranks."""
    for token_error, keyword_error in run_ranks(errors_of_invalid_calls, 2):
        assert "out of range" in token_error
        assert "OutputHead was called without positional arguments" in keyword_error
