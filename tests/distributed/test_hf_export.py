"""Exports to Hugging Face safetensors: the same bytes from any number of ranks and any layout."""

import hashlib
import json
import logging
import re
import resource
import time
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.harness.extents import verify_file
from tests.harness.hf_weights import to_external
from tests.harness.rank_pool import GROUP_TIMEOUT, kill_all_pools, run_ranks
from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError, with_checkpoint_errors
from torchtitan_like.checkpoint.hf import consolidate as consolidate_module
from torchtitan_like.checkpoint.hf import export as export_module
from torchtitan_like.checkpoint.hf.consolidate import consolidate
from torchtitan_like.checkpoint.hf.export import write_export
from torchtitan_like.checkpoint.hf.folder import write_folder
from torchtitan_like.checkpoint.hf.output_files import Output, run_in_rounds
from torchtitan_like.checkpoint.hf.safetensors_file import lay_out, read_header
from torchtitan_like.checkpoint.hf.safetensors_source import SafetensorsSource
from torchtitan_like.checkpoint.identity import SpecialToken
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.distributed.data_parallel import DTYPES
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models import get_spec, resolve_args
from torchtitan_like.models.hf_table import links
from torchtitan_like.util.extents import EXTENT

# Four extents with tensor borders inside, odd dimensions, and tensors with 0 to 2 dimensions.
SHAPES_OF = {
    "layers.0.w": (1025, 1537), "layers.2.w": (700, 1000), "layers.10.w": (999, 1001),
    "layers.10.b": (3,), "one": (1, 1),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _new_pools_for_other_tests():
    """Consolidation makes groups of some ranks, and torch names later groups by their number."""
    yield
    kill_all_pools()


@lru_cache
def full_state():
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES_OF.items()}
    others = {
        "scalar": torch.tensor(3.0),
        "count": torch.arange(11),
        "mask": torch.arange(77) % 3 == 0,
    }
    return (
        state
        | others
        | {"none": torch.zeros(0, 4), "half": torch.randn(300, 7, generator=generator).half()}
    )


ROWS = tuple(
    (name, f"model.{name}") for name in (*SHAPES_OF, "scalar", "count", "mask", "none", "half")
)


@lru_cache
def world_group():
    return HostGroup(list(range(dist.get_world_size())), timedelta(seconds=20))


def distribute(layout):
    """Return this rank's shards of `full_state()`."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rank, size = dist.get_rank(), dist.get_world_size()
    if layout == "replicated":
        return full_state()
    if layout == "stages":  # each tensor on one rank; rank 0 gets the fewest
        return {
            name: t for i, (name, t) in enumerate(full_state().items()) if (i + 1) % size == rank
        }
    if layout == "grid":
        mesh = init_device_mesh("cpu", (size // 2 or 1, min(size, 2)))
        placements = [Shard(0), Shard(1)]
    elif layout == "hybrid":
        mesh = init_device_mesh("cpu", (size // 2 or 1, min(size, 2)))
        placements = [Replicate(), Shard(0)]
    elif layout == "subset":
        mesh = DeviceMesh("cpu", list(range(max(1, size - 1))))
        placements = [Shard(0)]
    else:
        mesh = init_device_mesh("cpu", (size,))
        placements = [Shard({"rows": 0, "columns": 1}[layout])]
    return {
        name: distribute_tensor(t, mesh, placements, src_data_rank=None)
        if t.ndim >= max(p.dim + 1 for p in placements if isinstance(p, Shard))
        else t
        for name, t in full_state().items()
    }


def export(folder, layout="rows", dtype=None, index=None, **options):
    return write_export(
        Path(folder),
        distribute(layout),
        rows=ROWS,
        tied=(),
        dtype=DTYPES.get(dtype),
        group=world_group(),
        index=index,
        **options,
    )


def consolidate_counted(source, folder):
    """Merge shards; return the extents that this rank writes, and its log lines."""
    extents, lines, write = [], [], Output.write
    handler, root = logging.Handler(logging.INFO), logging.getLogger()
    level = root.level
    handler.emit = lambda record: lines.append(record.getMessage())

    def counted(output, extent, data):
        extents.append(extent)
        write(output, extent, data)

    Output.write = counted
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        consolidate(source, folder)
    finally:
        Output.write = write
        root.removeHandler(handler)
        root.setLevel(level)
    return extents, lines


def export_with(folder, layout, options):
    return export(folder, layout, **options)


def catch_error(function, *args, **options):
    """Return the error of this rank, and the seconds until it was raised."""
    start = time.monotonic()
    try:
        function(*args, **options)
    except CheckpointError as error:
        return str(error), time.monotonic() - start
    return "no error", time.monotonic() - start


def hash_files(folder):
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def load(folder):
    return {
        name: t
        for path in Path(folder).glob("*.safetensors")
        for name, t in load_file(path).items()
    }


OPTIONS = {"one-file": {}, "files-bf16": {"dtype": "bfloat16", "shard_bytes": 3_200_000}}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Return a folder with the exports of one rank."""
    folder = tmp_path_factory.mktemp("reference")
    for name, options in OPTIONS.items():
        run_ranks(export_with, 1, str(folder / name), "replicated", options)
    return folder


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_export_contains_all_tensors(reference, dtype):
    exported = load(reference / ("files-bf16" if dtype else "one-file"))
    for name, tensor in full_state().items():
        expected = tensor.to(DTYPES[dtype]) if dtype and tensor.is_floating_point() else tensor
        stored = exported.pop(f"model.{name}")
        assert stored.dtype == expected.dtype and torch.equal(stored, expected), name
    assert not exported


def test_files_are_split_by_bytes_and_indexed(reference):
    folder = reference / "files-bf16"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    for file in files:
        with pytest.raises(StopIteration):
            next(name for name in load_file(folder / file) if index["weight_map"][name] != file)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in load(folder).values())


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, "rows"), (2, "rows"), (4, "rows"), (2, "columns"), (4, "grid"), (4, "hybrid"),
     (4, "replicated"), (4, "subset"), (2, "stages"), (4, "stages")],
)  # fmt: skip
def test_every_layout_writes_the_same_bytes(tmp_path, reference, world_size, layout):
    for name, options in OPTIONS.items():
        folder = tmp_path / name
        results = run_ranks(export_with, world_size, str(folder), layout, options)
        assert hash_files(folder) == hash_files(reference / name), name
        assert set(results[0]) == {path.name for path in folder.iterdir()}
        for file, record in results[0].items():
            verify_file(folder / file, record)
        assert all(result == results[0] for result in results)


def test_all_ranks_share_the_consolidation_and_log_its_speed(tmp_path):
    run_ranks(write_torch_shards, 4, str(tmp_path / "shards"), "rows", None)
    results = run_ranks(consolidate_counted, 4, str(tmp_path / "shards"), str(tmp_path / "out"))
    written = [extent for extents, _ in results for extent in extents]
    assert all(extents for extents, _ in results), "expected writes from every rank"
    assert len(written) == len(set(written)), "expected each extent once"
    for _, lines in results:
        (line,) = (line for line in lines if line.startswith("Consolidated "))
        assert re.fullmatch(
            r"Consolidated \d+ shard files into 1 files .* on 4 ranks with .* in \d+\.\d\d seconds "
            r"\(files by rank, some shared: 1, 1, 1, 1\)",
            line,
        )


def test_export_keeps_the_file_assignment_of_a_given_index(tmp_path):
    names = [hf_name for _, hf_name in ROWS]
    index = {name: f"part-{i % 2}.bin" for i, name in enumerate(names)}
    run_ranks(
        export, 2, str(tmp_path / "complete"), "rows", None, index | {"model.tied": "part-2.bin"}
    )
    for i in range(2):
        entries, _ = read_header(tmp_path / "complete" / f"model-0000{i + 1}-of-00002.safetensors")
        assert {entry.name for entry in entries} == {
            name for name in names if index[name] == f"part-{i}.bin"
        }
    del index[names[3]]
    run_ranks(export, 2, str(tmp_path / "incomplete"), "rows", None, index)
    assert [path.name for path in (tmp_path / "incomplete").glob("*.safetensors")] == [
        "model.safetensors"
    ]


# ---- tensor parallelism and FSDP2


def export_parallel(folder):
    """Export a model under tensor parallelism and FSDP2, and return its full weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(24, 22), torch.nn.Linear(22, 10), torch.nn.LayerNorm(10)
    )
    full_state = {name: p.detach().clone() for name, p in model.named_parameters()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    tensors = {name: p.detach() for name, p in model.state_dict().items()}
    assert any("_Strided" in repr(t.placements) for t in tensors.values())
    rows = tuple((name, name) for name in tensors)
    write_export(Path(folder), tensors, rows=rows, tied=(), dtype=None, group=world_group())
    return full_state


def test_export_under_tensor_parallelism_and_fsdp(tmp_path):
    expected = run_ranks(export_parallel, 4, str(tmp_path))[0]
    exported = load(tmp_path)
    assert exported.keys() == expected.keys() and all(
        torch.equal(exported[name], expected[name]) for name in exported
    )


# ---- transformers

LLAMA = get_spec("llama3")
SMALL = {
    "dim": 64,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 2048,
    "max_seq_len": 64,
    "multiple_of": 32,
}


def build(overrides):
    args = resolve_args(LLAMA, "debugmodel", SMALL | overrides)
    with torch.device("meta"):
        model = LLAMA.build(args)
    materialize(model, torch.device("cpu"))
    initialize(model, LLAMA.init_table(args), 0)
    with torch.no_grad():
        model.tok_embeddings.weight.div_(8)  # logits of order 1, tied or not
    return args, model


def export_llama(folder, overrides, dtype, assets):
    from torch.distributed.fsdp import fully_shard

    args, model = build(overrides)
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    tensors = {name: p.detach() for name, p in model.state_dict().items()}
    write_export(
        Path(folder),
        tensors,
        rows=LLAMA.hf_names(args),
        tied=LLAMA.tied(args),
        dtype=DTYPES[dtype],
        group=world_group(),
    )
    if dist.get_rank() == 0:
        tokens = {
            "bos": SpecialToken("<|begin_of_text|>", 2046),
            "eos": SpecialToken("<|end_of_text|>", 2047),
        }
        write_folder(
            Path(folder),
            config=LLAMA.hf_config(args),
            dtype=DTYPES[dtype],
            assets=Path(assets),
            **tokens,
        )


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        ({}, "float32"),
        ({"enable_weight_tying": True}, "float32"),
        ({"rope_scaling_factor": 1.0}, "bfloat16"),
    ],
    ids=["plain", "tied", "bf16"],
)
def test_transformers_loads_the_export(tmp_path, repo_root, overrides, dtype):
    """The report has no missing or unexpected key; weights, logits and tokenizer are equal."""
    transformers = pytest.importorskip("transformers")
    assets = repo_root / "tests/assets/tokenizer"
    run_ranks(export_llama, 2, str(tmp_path / "hf"), overrides, dtype, str(assets))
    args, model = build(overrides)
    model = model.to(DTYPES[dtype])
    hf_model, report = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, dtype="auto"
    )
    assert not any(report.values()), report
    assert (
        hf_model.dtype == DTYPES[dtype]
        and hf_model.config.bos_token_id == 2046
        and hf_model.config.eos_token_id == 2047
    )
    parameters = dict(model.named_parameters())
    name_links = links(
        LLAMA.hf_names(args),
        {name: tuple(p.shape) for name, p in parameters.items()},
        LLAMA.tied(args),
    )
    for name, tensor in to_external(name_links, parameters).items():
        assert torch.equal(hf_model.state_dict()[name], tensor), name
    if dtype == "float32":  # the two round differently in bf16
        tokens = torch.randint(0, 2048, (2, 48), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            assert (hf_model(tokens).logits - model(tokens)).abs().max() <= 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (2046, 2047)
    text = "To be, or not to be:\n  that is 12345"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_export_adds_a_missing_tokenizer_config(tmp_path, repo_root):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "assets").mkdir()
    (tmp_path / "hf").mkdir()
    content = (repo_root / "tests/assets/tokenizer/tokenizer.json").read_bytes()
    (tmp_path / "assets/tokenizer.json").write_bytes(content)
    eos = SpecialToken("<|end_of_text|>", 2047)
    args = resolve_args(LLAMA, "debugmodel", SMALL)
    options = {
        "config": LLAMA.hf_config(args),
        "dtype": torch.float32,
        "assets": tmp_path / "assets",
    }
    records = write_folder(tmp_path / "hf", bos=None, eos=eos, **options)
    for name, record in records.items():
        verify_file(tmp_path / "hf" / name, record)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 2047)
    assert (
        tokenizer("To be", add_special_tokens=False)["input_ids"]
        == pytest.importorskip("tokenizers")
        .Tokenizer.from_str(content.decode())
        .encode("To be", add_special_tokens=False)
        .ids
    )


@pytest.mark.parametrize("source", ["folder", "file", "original", "original file"])
def test_tiktoken_model_is_exported_to_the_original_folder(tmp_path, repo_root, source):
    """llama.cpp reads a `tokenizer.model` next to the weights as SentencePiece.

    `load_tokenizer` reads the exported folder.
    """
    assets = tmp_path / "assets"
    file = assets / ("original" if "original" in source else ".") / "tokenizer.model"
    file.parent.mkdir(parents=True)
    content = (repo_root / "tests/assets/tokenizer/tokenizer.model").read_bytes()
    file.write_bytes(content)
    (tmp_path / "hf").mkdir()
    path = file if "file" in source else assets
    config = (file.parent if "file" in source else assets) / "tokenizer_config.json"
    config.write_text('{"pat_str": "Llama 3"}')
    before = load_tokenizer(path)
    tokens = [SpecialToken(before.decode([i]), i) for i in (before.bos_id, before.eos_id)]
    records = write_folder(
        tmp_path / "hf",
        config={},
        dtype=torch.float32,
        assets=path,
        bos=tokens[0],
        eos=tokens[1],
    )
    assert {name for name in records if "model" in name} == {"original/tokenizer.model"}
    for name, record in records.items():
        verify_file(tmp_path / "hf" / name, record)
    assert (tmp_path / "hf/original/tokenizer.model").read_bytes() == content
    after = load_tokenizer(tmp_path / "hf")
    assert after.fingerprint == before.fingerprint
    assert (after.bos_id, after.eos_id) == (before.bos_id, before.eos_id)
    assert after.encode("To be, or not") == before.encode("To be, or not")


def test_sentencepiece_model_is_exported_next_to_the_weights(tmp_path):
    """llama.cpp expects it there for Llama 2."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "hf").mkdir()
    content = b"\n\x0e\n\x05<unk>\x15\x00"
    (tmp_path / "assets/tokenizer.model").write_bytes(content)
    write_folder(
        tmp_path / "hf",
        config={},
        dtype=torch.float32,
        assets=tmp_path / "assets",
        bos=None,
        eos=None,
    )
    assert (tmp_path / "hf/tokenizer.model").read_bytes() == content


# ---- consolidation of shards


def write_torch_shards(folder, layout, numbers):
    import torch.distributed.checkpoint as dcp

    tensors = {
        hf_name: tensor
        for (_, hf_name), tensor in zip(ROWS, distribute(layout).values(), strict=True)
    }
    writer = dcp.HuggingFaceStorageWriter(
        folder, fqn_to_index_mapping=numbers, save_distributed=True
    )
    dcp.save(tensors, storage_writer=writer)


def consolidate_on(ranks, source, folder, mapping, num_threads):
    """Consolidate on a subgroup; other ranks return None."""
    group = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        return consolidate(source, folder, mapping, num_threads, group)
    return None


@pytest.mark.parametrize("layout", ["rows", "columns", "grid", "hybrid", "replicated"])
def test_consolidation_of_torch_shards_equals_the_export(tmp_path, reference, layout):
    """Consolidate on two of four ranks, on four, and on one.

    The tensors include scalars, integers and bools, which torch's consolidation handles
    incorrectly.
    """
    run_ranks(write_torch_shards, 4, str(tmp_path / "shards"), layout, None)
    for name, ranks, num_threads in (("some", [1, 3], 2), ("all", [0, 1, 2, 3], 5)):
        args = (ranks, str(tmp_path / "shards"), str(tmp_path / name), None, num_threads)
        results = run_ranks(consolidate_on, 4, *args)
        assert [result is not None for result in results] == [rank in ranks for rank in range(4)]
        assert hash_files(tmp_path / name) == hash_files(reference / "one-file")
    records = consolidate(tmp_path / "shards", tmp_path / "alone")
    assert hash_files(tmp_path / "alone") == hash_files(reference / "one-file")
    assert all(records == result for result in results)


def test_mapping_assigns_tensors_to_files(tmp_path):
    numbers = {hf_name: 1 + i % 3 for i, (_, hf_name) in enumerate(ROWS)}
    run_ranks(write_torch_shards, 2, str(tmp_path / "shards"), "rows", numbers)
    consolidate(tmp_path / "shards", tmp_path / "out", numbers)
    for number in (1, 2, 3):
        entries, _ = read_header(tmp_path / "out" / f"model-0000{number}-of-00003.safetensors")
        assert {entry.name for entry in entries} == {
            name for name, n in numbers.items() if n == number
        }
    assert all(
        torch.equal(load(tmp_path / "out")[f"model.{name}"], tensor)
        for name, tensor in full_state().items()
    )


def shard(folder, number, name, start, values, metadata=None):
    """Write a shard file with one 1-D tensor."""
    metadata = metadata or {"DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": [start]}})}
    layout = lay_out(
        f"shard-{number:05d}-model-00001-of-00001.safetensors",
        [(name, "F32", (len(values),))],
        metadata,
    )
    (folder / layout.name).write_bytes(
        layout.header + torch.tensor(values, dtype=torch.float32).numpy().tobytes()
    )


def test_inconsistent_shards_are_rejected_before_any_write(tmp_path):
    """The output folder does not exist after the error."""
    cases = {
        "hole": ([(1, 0, 2), (2, 3, 2)], None, r"w\[2:3\] is missing"),
        "overlap": ([(1, 0, 3), (2, 2, 2)], None, r"w\[2:3\] is stored more than once"),
        "twice": ([(1, 0, 2), (2, 0, 2)], None, "contain the same part of w"),
        "number": ([(1, 0, 2), (3, 2, 2)], None, "lacks the file of shard 2"),
        "empty": ([], None, "contains no .*safetensors"),
        "unknown": ([(1, 0, 2)], {"w": 1, "v": 2}, r"the folder lacks 1 tensors \(v\)"),
        "unnamed": ([(1, 0, 2)], {}, r"the mapping lacks 1 tensors \(w\)"),
    }
    for case, (shards, mapping, words) in cases.items():
        source = tmp_path / case
        source.mkdir()
        for number, start, count in shards:
            shard(source, number, "w", start, [1.0] * count)
        with pytest.raises(CheckpointError, match=words):
            consolidate(source, tmp_path / f"{case}-out", mapping)
        assert not (tmp_path / f"{case}-out").exists()


def test_truncated_shard_is_rejected(tmp_path):
    shard(tmp_path, 1, "w", 0, [1.0, 2.0])
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedError, match="as in its header"):
        consolidate(tmp_path, tmp_path / "out")


def test_shards_with_wrong_metadata_are_rejected(tmp_path):
    shard(tmp_path, 1, "w", 0, [1.0], metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="lacks DCP_SHARDING_INFO"):
        consolidate(tmp_path, tmp_path / "out")
    shard(
        tmp_path, 1, "w", 0, [1.0], metadata={"DCP_SHARDING_INFO": '{"v": {"saved_offsets": [0]}}'}
    )
    with pytest.raises(CheckpointError, match="does not match its tensors"):
        consolidate(tmp_path, tmp_path / "out")


# ---- failures


def with_full_disk(function, *args):
    """Call the function with a file size limit on rank 1, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    modules = (export_module, consolidate_module)
    rounds = [module.EXTENTS_PER_ROUND for module in modules]
    for module in modules:
        module.EXTENTS_PER_ROUND = 1  # many rounds, so that no rank finishes before the error
    try:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMITS[function], hard))
        return catch_error(function, *args)
    finally:
        for module, number in zip(modules, rounds, strict=True):
            module.EXTENTS_PER_ROUND = number
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


LIMITS = {export: EXTENT, consolidate: 8 * 2**20}


@pytest.mark.parametrize("function", LIMITS, ids=["export", "consolidate"])
def test_error_on_one_rank_is_raised_on_all_ranks(tmp_path, function):
    args = [str(tmp_path / "out")]
    if function is consolidate:
        run_ranks(write_torch_shards, 2, str(tmp_path / "shards"), "rows", None)
        args = [str(tmp_path / "shards"), *args]
    for error, seconds in run_ranks(with_full_disk, 2, function, *args):
        assert (
            "rank 1" in error
            and "rank 0" not in error
            and "File too large" in error
            and "out" in error
        ), error
        assert seconds < GROUP_TIMEOUT.total_seconds()
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == (0 if function is consolidate else 1)
    for path in files:
        assert path.read_bytes()[:8] == bytes(8), (
            "expected no header, so that no program loads the file"
        )


def run_failing_rounds(failing_rank):
    """Run 50 rounds; return this rank's numbers of calls, and its error."""
    calls = {"work": 0, "exchange": 0}

    def work(turn):
        calls["work"] += 1
        if turn == 3 and dist.get_rank() == failing_rank:
            raise OSError(28, "No space left on device", "model.safetensors")

    def exchange(turn):
        calls["exchange"] += 1
        world_group().barrier()  # times out if a rank does not call it

    error, _ = catch_error(run_in_rounds, with_checkpoint_errors(world_group()), 50, work, exchange)
    return calls, error


def test_all_ranks_stop_in_the_round_after_a_failure():
    (first, error), (second, other) = run_ranks(run_failing_rounds, 2, 1)
    assert first == {"work": 5, "exchange": 5} and second == {"work": 4, "exchange": 5}
    assert (
        error == other and "rank 1" in error and "No space left" in error and "rank 0" not in error
    )


def consolidate_with_a_blind_rank(source, folder, subject):
    """Consolidate while rank 1 cannot open the shards, or any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fill = SafetensorsSource.fill

    def fill_without_files(shards, reads):
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        fill(shards, reads)

    try:
        if dist.get_rank() == 1 and subject == "shard":
            SafetensorsSource.fill = fill_without_files
        elif dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        return catch_error(consolidate, source, folder)
    finally:
        SafetensorsSource.fill = fill
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("subject", ["shard", "model"])
def test_unreadable_files_on_one_rank_are_an_error_on_all_ranks(tmp_path, subject):
    run_ranks(write_torch_shards, 2, str(tmp_path / "shards"), "rows", None)
    for error, seconds in run_ranks(
        consolidate_with_a_blind_rank, 2, str(tmp_path / "shards"), str(tmp_path / "out"), subject
    ):
        assert (
            re.search(rf"rank 1: .*{subject}.*: Too many open files\. Expected fewer open", error)
            and seconds < GROUP_TIMEOUT.total_seconds()
        )
    assert not list((tmp_path / "out").iterdir())


def test_export_overwrites_no_file(tmp_path):
    (tmp_path / "model.safetensors").write_text("precious")
    for error, _ in run_ranks(catch_error, 2, export, str(tmp_path)):
        assert "model.safetensors exists already" in error
    assert (tmp_path / "model.safetensors").read_text() == "precious"


def export_different_tensors(folder):
    tensors = {"w": torch.zeros(2 + dist.get_rank())}
    write_export(
        Path(folder), tensors, rows=(("w", "w"),), tied=(), dtype=None, group=world_group()
    )


def test_export_of_different_tensors_by_rank_is_rejected(tmp_path):
    for error, _ in run_ranks(catch_error, 2, export_different_tensors, str(tmp_path)):
        assert "in another one" in error
