"""Load weights of other formats into sharded models.

Every topology gets the same bits, each element is read once, and all ranks raise the same errors.
"""

import json
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

from tests.harness.hf_weights import load_hf, load_meta, load_torchtitan, unpermute_rows
from tests.harness.rank_pool import run_ranks
from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError, with_checkpoint_errors
from torchtitan_like.checkpoint.hf import safetensors_source
from torchtitan_like.checkpoint.hf.load import config_differences
from torchtitan_like.distributed.initialize import materialize
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models import get_spec, resolve_args
from torchtitan_like.util.boxes import slices
from torchtitan_like.util.shards import local_boxes

LLAMA = get_spec("llama3")
# No number of ranks divides these rows, so shards are uneven and start within a head.
SIZES = {
    "dim": 30, "n_layers": 2, "n_heads": 3, "n_kv_heads": 1, "vocab_size": 65, "multiple_of": 7,
    "max_seq_len": 64,
    "rope_scaling_factor": 1.0,
}  # fmt: skip
TIMEOUT = timedelta(seconds=25)


def sizes(tied):
    return resolve_args(LLAMA, "debugmodel", SIZES | {"enable_weight_tying": tied})


@pytest.fixture(scope="module")
def original(request, tmp_path_factory):
    """Save a transformers Llama in the formats of Hugging Face, TorchTitan and Meta.

    The parameter of the fixture ties the embeddings. The Hugging Face format has several files.
    """
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("original")
    args = sizes(request.param)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA.hf_config(args))).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape) / 4 + ("norm" in name))
    model.save_pretrained(folder / "hf", max_shard_size="12KB")
    assert len(list((folder / "hf").glob("*.safetensors"))) > 3
    hf_names = dict(LLAMA.hf_names(args))
    weights = {}
    for name in parameters(args):
        pattern = ".".join("{}" if part.isdigit() else part for part in name.split("."))
        numbers = [part for part in name.split(".") if part.isdigit()]
        weights[name] = model.state_dict()[hf_names[pattern].format(*numbers)].clone()
    torch.save(weights, folder / "ours.pt")
    heads = {"wq": args.n_heads, "wk": args.num_kv_heads}
    meta = {
        n: unpermute_rows(w, heads[k]) if (k := n.split(".")[-2]) in heads else w
        for n, w in weights.items()
    }
    (folder / "meta").mkdir()
    torch.save(meta, folder / "meta" / "consolidated.00.pth")
    run_ranks(save_as_torchtitan, 2, str(folder / "torchtitan"), meta)
    tokens = torch.randint(0, args.vocab_size, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return folder, request.param, tokens, model(tokens).logits


def parameters(args):
    with torch.device("meta"):
        return [name for name, _ in LLAMA.build(args).named_parameters()]


def save_as_torchtitan(folder, weights):
    """Save weights sharded by rows under top-level names, with an optimizer state."""
    import torch.distributed.checkpoint as dcp

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in weights.items()}
    dcp.save(
        state | {"optimizer": {"state.norm.weight.step": torch.zeros(())}}, checkpoint_id=folder
    )


def build(args, mesh):
    """Build a model like the trainer: on the meta device, sharded, then materialized."""
    with torch.device("meta"):
        model = LLAMA.build(args)
    if mesh is not None:
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    materialize(model, torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model


LOADERS = {"hf": load_hf, "torchtitan": load_torchtitan, "meta": load_meta}


def load_into(model, args, folder, kind, group):
    rows = LLAMA.hf_names(args) if kind == "hf" else LLAMA.meta_names(args)
    options = {"quantized": False} if kind == "hf" else {}
    state = dict(model.named_parameters(remove_duplicate=False))
    return LOADERS[kind](
        folder / kind, state, rows=rows, tied=LLAMA.tied(args), group=group, **options
    )


def load_and_compare(folder, tied, kind, shape, tokens):
    """Return (names of differing weights, logits, elements read by this rank, report)."""
    args, world = sizes(tied), dist.get_world_size()
    mesh = (
        init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        if world > 1
        else None
    )
    group = HostGroup(list(range(world)), TIMEOUT)
    model = build(args, mesh)
    read, read_box = [0], safetensors_source.read_box

    def counting(*arguments):
        numbers = read_box(*arguments)
        read[0] += numbers.numel()
        return numbers

    safetensors_source.read_box = counting
    try:
        report = load_into(model, args, folder, kind, with_checkpoint_errors(group))
    finally:
        safetensors_source.read_box = read_box
        group.destroy()
    expected = torch.load(folder / "ours.pt")
    full_tensors = {
        n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()
    }
    assert full_tensors.keys() == expected.keys()
    differing = [name for name in expected if not torch.equal(full_tensors[name], expected[name])]
    with torch.no_grad():
        return differing, model(tokens), read[0], report


untied = pytest.mark.parametrize("original", [False], ids=["untied"], indirect=True)


@pytest.mark.parametrize(
    ("original", "shape"),
    [(False, (1,)), (False, (2,)), (False, (4,)), (False, (2, 2)), (True, (2,))],
    ids=["1", "2", "4", "2x2", "tied-2"],
    indirect=["original"],
)
@pytest.mark.parametrize("kind", ["hf", "torchtitan", "meta"])
def test_every_format_loads_the_same_weights_on_every_topology(original, kind, shape):
    folder, tied, tokens, logits = original
    world = torch.Size(shape).numel()
    results = run_ranks(load_and_compare, world, folder, tied, kind, shape, tokens)
    for differing, actual_logits, _, report in results:
        assert differing == []
        # fp32: sums of at most 65 products of order 1, added in a different order.
        assert (actual_logits - logits).abs().max() <= 1e-5
        assert report == results[0][3] and report.missing == () and report.unused == ()
    if kind == "hf":
        read, total = sum(n for _, _, n, _ in results), LLAMA.num_params(sizes(tied))
        assert read == total * (2 if shape == (2, 2) else 1), (
            "each rank must read only its own shards"
        )


@untied
def test_config_differences_include_sizes_that_shapes_do_not_determine(original):
    folder, args = original[0] / "hf", sizes(False)
    assert config_differences(folder, LLAMA.hf_config(args)) == []
    other = resolve_args(
        LLAMA,
        "debugmodel",
        SIZES | {"n_heads": 15, "n_kv_heads": 5, "rope_scaling_factor": 8.0, "max_seq_len": 8},
    )
    message = " ".join(config_differences(folder, LLAMA.hf_config(other)))
    for words in (
        "num_attention_heads = 3, this model has 15",
        "num_key_value_heads = 1",
        "rope_scaling = None",
    ):
        assert words in message
    assert "has max_position_embeddings" not in message
    assert config_differences(original[0], LLAMA.hf_config(other)) == []


def load_columns_and_strides(folder):
    """Load under FSDP over tensor parallelism; return the placements and the differing weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    args = sizes(False)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LLAMA.build(args).named_parameters()}
    module = torch.nn.Module()
    for name, shape in shapes.items():
        dim = 1 if name.endswith(("wo.weight", "w2.weight")) else 0
        tensor = distribute_tensor(torch.full(shape, torch.nan), mesh["tp"], [Shard(dim)])
        module.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor))
    fully_shard(module, mesh=mesh["fsdp"])
    model = {name: getattr(module, name.replace(".", "_")) for name in shapes}
    # Two separate row ranges of uneven lengths: a strided shard without its FSDP half.
    row_ranges = {0: [(0, 17), (33, 16)], 1: [(17, 16), (49, 16)]}[mesh["tp"].get_local_rank()]
    rows = torch.full((sum(n for _, n in row_ranges), args.dim), torch.nan)
    name = "tok_embeddings.weight"
    model[name] = DTensor.from_local(
        rows,
        mesh["tp"],
        [_StridedShard(0, split_factor=2)],
        shape=shapes[name],
        stride=(args.dim, 1),
    )
    group = HostGroup(list(range(4)), TIMEOUT)
    load_hf(
        folder / "hf", model, rows=LLAMA.hf_names(args), tied=(), quantized=False,
        group=with_checkpoint_errors(group),
    )  # fmt: skip
    group.destroy()
    expected = torch.load(folder / "ours.pt")
    placements = {
        (type(p).__name__, p.dim) for parameter in model.values() for p in parameter.placements
    }
    differing = [
        name
        for name, parameter in model.items()
        for box, view in local_boxes(parameter)
        if not torch.equal(view, expected[name][slices(box)])
    ]
    if not torch.equal(
        rows, torch.cat([expected[name][first : first + n] for first, n in row_ranges])
    ):
        differing.append(name)
    return placements, differing


@untied
def test_column_and_strided_shards_load_correctly(original):
    folder = original[0]
    for placements, differing in run_ranks(load_columns_and_strides, 4, folder):
        assert differing == []
        assert placements == {("_StridedShard", 0), ("Shard", 0), ("Shard", 1)}


def load_stage(folder, change):
    """Load the first layer on rank 0 and the rest on rank 1; return the error or the report."""
    args, rank = sizes(False), dist.get_rank()
    model = build(args, None)
    group = HostGroup([0, 1], TIMEOUT)
    first = ("tok_embeddings", "layers.0")
    stage_parameters = {
        n: p for n, p in model.named_parameters() if n.startswith(first) is (rank == 0)
    }
    if change == "missing":
        stage_parameters.pop("norm.weight", None)
    source = safetensors_source.SafetensorsSource
    fill = source.fill

    def raise_os_error(self, boxes):
        raise OSError(5, "Input/output error")

    if change == "unreadable" and rank == 1:
        source.fill = raise_os_error
    try:
        report = load_hf(
            folder / "hf", stage_parameters, rows=LLAMA.hf_names(args), tied=(), quantized=False,
                group=with_checkpoint_errors(group),
            )  # fmt: skip
    except CheckpointError as error:
        return str(error)
    finally:
        source.fill = fill
        group.destroy()
    expected = torch.load(folder / "ours.pt")
    assert all(torch.equal(p, expected[name]) for name, p in stage_parameters.items())
    return report


@untied
def test_pipeline_stages_use_all_stored_tensors_together(original):
    folder = original[0]
    first, second = run_ranks(load_stage, 2, folder, "")
    index = json.loads((folder / "hf/model.safetensors.index.json").read_text())
    assert first == second and sorted(first.used) == sorted(index["weight_map"])


@untied
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("missing", "1 not in this model: model.norm.weight"),
        ("unreadable", "rank 1: Input/output error. Expected a disk that works"),
    ],
)
def test_error_on_one_rank_is_raised_on_all_ranks(original, change, words):
    folder = original[0]
    errors = run_ranks(load_stage, 2, folder, change)
    assert errors[0] == errors[1] and words in errors[0]


def local_rows_of_three():
    """Return this rank's rows of a (3, 2) tensor sharded over 4 ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rows = distribute_tensor(
        torch.arange(6.0).view(3, 2), init_device_mesh("cpu", (4,)), [Shard(0)]
    )
    return [(box, local_rows.flatten().tolist()) for box, local_rows in local_boxes(rows)]


def test_rank_without_rows_has_no_local_boxes():
    shares = run_ranks(local_rows_of_three, 4)
    assert shares[:3] == [
        [(((row, 1, 1), (0, 2, 1)), [2.0 * row, 2.0 * row + 1])] for row in range(3)
    ]
    assert shares[3] == []


def test_missing_config_keys_have_transformers_defaults(tmp_path):
    model_config = {
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3"},
        "rms_norm_eps": 1e-5,
        "hidden_size": 8,
    }
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    keys = [
        line.split(" has ")[1].split(" = ")[0]
        for line in config_differences(tmp_path, model_config)
    ]
    assert keys == ["rope_theta", "rope_scaling", "rms_norm_eps"]
    model_config = {"rope_theta": 10000.0, "rope_scaling": None, "rms_norm_eps": 1e-6}
    assert config_differences(tmp_path, model_config) == []


def test_dcp_index_with_a_missing_chunk_is_damage(tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(4, 2)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([8, 2])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    group = with_checkpoint_errors(HostGroup.alone())
    with pytest.raises(DamagedError, match=r"lacks chunks of w \[8, 2\]"):
        load_torchtitan(
            tmp_path, {"w": torch.zeros(8, 2)}, rows=(("w", "w"),), tied=(), group=group
        )


def test_replicated_tensors_of_meta_files_must_be_equal(tmp_path):
    for i in range(2):
        torch.save(
            {"norm.weight": torch.full((4,), float(i))}, tmp_path / f"consolidated.{i:02d}.pth"
        )
    group, rows = with_checkpoint_errors(HostGroup.alone()), (("norm.weight", "norm.weight"),)
    with pytest.raises(DamagedError, match="the values of norm.weight differ between files"):
        load_meta(tmp_path, {"norm.weight": torch.zeros(4)}, rows=rows, tied=(), group=group)


def test_config_that_is_not_json_is_damage(tmp_path):
    (tmp_path / "config.json").write_text("{")
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(DamagedError, match="config.json is not valid"):
        safetensors_source.open_safetensors(tmp_path, quantized=False)
