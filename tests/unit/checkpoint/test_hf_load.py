"""Loading weights of other formats on one rank fills every tensor exactly and refuses damage."""

import json
import logging
import re
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.harness.hf_weights import (
    load_hf,
    load_meta,
    load_torchtitan,
    to_external,
    unpermute_rows,
)
from torchtitan_like.checkpoint.dcp_metadata import Chunk
from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError, with_checkpoint_errors
from torchtitan_like.checkpoint.hf import load as hf_load
from torchtitan_like.checkpoint.hf.safetensors_source import read_box
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models import get_spec, resolve_args
from torchtitan_like.models.hf_table import Row, links
from torchtitan_like.util.boxes import slices, whole

LLAMA = get_spec("llama3")
SMALL = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 64,
    "multiple_of": 16,
}
ROWS = (
    ("layers.{}.w", "model.layers.{}.weight"),
    ("embedding", "model.embed.weight"),
    ("head", "lm_head.weight"),
)
TIED = (("head", "embedding"),)


def one_rank_group():
    return with_checkpoint_errors(HostGroup.alone())


def random(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def empty(tensors, dtype=torch.float32):
    return {
        name: torch.full(tensor.shape, torch.nan, dtype=dtype) for name, tensor in tensors.items()
    }


@pytest.fixture
def state():
    return random({"layers.0.w": (6, 5), "layers.1.w": (7, 5), "embedding": (9, 5), "head": (9, 5)})


def write(folder: Path, state, files=1, index=True):
    """Write `state` in Hugging Face's format, with its names, to `files` files."""
    tensors = to_external(links(ROWS, {name: tuple(t.shape) for name, t in state.items()}), state)
    return write_files(folder, tensors, files, index)


def write_files(folder: Path, tensors, files=1, index=True):
    folder.mkdir(exist_ok=True)
    names = (
        [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
        if files > 1
        else ["model.safetensors"]
    )
    weight_map = {name: names[i % files] for i, name in enumerate(sorted(tensors))}
    for file in names:
        in_file = {
            name: tensor.contiguous()
            for name, tensor in tensors.items()
            if weight_map[name] == file
        }
        save_file(in_file, folder / file)
    if index and files > 1:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    return folder


def load(folder, state, tied=(), quantized=False, rows=ROWS):
    return load_hf(folder, state, rows=rows, tied=tied, quantized=quantized, group=one_rank_group())


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


# ---- safetensors


@pytest.mark.parametrize(("files", "index"), [(1, False), (3, True), (3, False)])
def test_a_directory_fills_the_tensors_in_place(tmp_path, state, files, index):
    loaded = empty(state)
    before = {name: tensor.data_ptr() for name, tensor in loaded.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = load(write(tmp_path / "hf", state, files, index), loaded)
    assert_equal(loaded, state)
    assert {name: tensor.data_ptr() for name, tensor in loaded.items()} == before
    assert sorted(report.used) == sorted(
        ["model.layers.0.weight", "model.layers.1.weight", "model.embed.weight", "lm_head.weight"]
    )
    assert (report.unused, report.missing, report.converted) == ((), (), {})


def test_large_tensors_are_read_in_parts(tmp_path, state, monkeypatch):
    monkeypatch.setattr(hf_load, "MAX_ELEMENTS", 3)
    loaded = empty(state)
    load(write(tmp_path / "hf", state), loaded)
    assert_equal(loaded, state)


def test_dtypes_are_converted_and_logged(tmp_path, state):
    stored = {name: tensor.bfloat16() for name, tensor in state.items()}
    loaded = empty(state)
    report = load(write(tmp_path / "hf", stored), loaded)
    assert_equal(loaded, {name: tensor.float() for name, tensor in stored.items()})
    assert set(report.converted.values()) == {"bfloat16 -> float32"} and len(report.converted) == 4
    assert "Read 4 tensors" in str(report) and "4 bfloat16 -> float32" in str(report)


def test_missing_extra_and_misshapen_tensors_are_reported_before_reading(tmp_path, state):
    folder = write(tmp_path / "hf", state)
    loaded = empty(
        state
        | {"layers.2.w": torch.empty(1), "layers.3.w": torch.empty(1), "head": torch.empty(9, 4)}
    )
    del loaded["layers.0.w"]
    with pytest.raises(CheckpointError) as error:
        load(folder, loaded)
    text = str(error.value)
    assert "2 missing: model.layers.2.weight, model.layers.3.weight" in text
    assert "1 not in this model: model.layers.0.weight" in text
    assert "1 of another shape or dtype: lm_head.weight is (9, 5), this model needs (9, 4)" in text
    assert not isinstance(error.value, DamagedError)
    assert all(tensor.isnan().all() for tensor in loaded.values())


def test_integer_tensors_are_refused(tmp_path, state):
    folder = write(tmp_path / "hf", state | {"head": torch.zeros(9, 5, dtype=torch.int8)})
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight has another kind of dtype \(int8 -> float32\)"
    ):
        load(folder, empty(state))


def test_computed_tables_are_not_required(tmp_path, state, caplog):
    folder = write(tmp_path / "hf", state)
    save_file(
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, folder / "more.safetensors"
    )
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    with caplog.at_level(logging.INFO):
        report = load(folder, empty(state))
    assert report.unused == ("model.layers.0.self_attn.rotary_emb.inv_freq",)
    assert "not used: model.layers.0.self_attn.rotary_emb.inv_freq" in caplog.text


def test_a_tied_tensor_may_be_stored_once_or_twice(tmp_path, state):
    """If the file contains the second name, its values must be equal."""
    tied = {name: tensor for name, tensor in state.items() if name != "head"}
    folder = write(tmp_path / "absent", tied)
    loaded = empty(tied)
    loaded["head"] = loaded["embedding"]
    assert "lm_head.weight" not in load(folder, loaded, TIED).used
    assert_equal(loaded, tied | {"head": tied["embedding"]})

    assert (
        "lm_head.weight"
        in load(write(tmp_path / "equal", tied | {"head": tied["embedding"]}), loaded, TIED).used
    )
    with pytest.raises(
        CheckpointError,
        match="head has its own values, but this model ties it.*enable_weight_tying = false",
    ):
        load(write(tmp_path / "other", state), loaded, TIED)
    with pytest.raises(CheckpointError, match="1 missing: lm_head.weight"):
        load(folder, empty(state))


def test_rows_may_join_split_transpose_and_interleave(tmp_path):
    rows = (
        Row(("{}.w1", "{}.w3"), "{}.gate_up", transposed=True, axis=1),
        Row("{}.w2", "{}.experts.{e}.down"),
        Row("{}.wqkv", ("{}.q", "{}.k", "{}.v"), sizes=(8, 4, 4)),
        Row("{}.rotary", "{}.pairs", interleaved_heads=2),
    )
    shapes = {
        "0.w1": (3, 4, 5),
        "0.w3": (3, 4, 5),
        "0.w2": (3, 5, 4),
        "0.wqkv": (16, 5),
        "0.rotary": (12, 5),
    }
    state = random(shapes)
    loaded = empty(state)
    load(
        write_files(tmp_path / "hf", to_external(links(rows, shapes), state), 2), loaded, rows=rows
    )
    assert_equal(loaded, state)


@st.composite
def boxes(draw):
    shape = draw(st.lists(st.integers(1, 6), min_size=0, max_size=4))
    box = []
    for n in shape:
        start, step = draw(st.integers(0, n - 1)), draw(st.integers(1, 3))
        box.append((start, draw(st.integers(1, -(-(n - start) // step))), step))
    return tuple(shape), tuple(box)


@settings(deadline=None, max_examples=200)
@given(boxes())
def test_any_rectangle_of_a_stored_tensor_is_read(tmp_path_factory, shape_and_box):
    shape, box = shape_and_box
    stored = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)
    path = tmp_path_factory.getbasetemp() / "numbers"
    path.write_bytes(b"\xff" * 5 + stored.numpy().tobytes())
    with open(path, "rb", buffering=0) as file:
        actual = read_box(file, Chunk((), shape, "numbers", 5, 0), torch.int16, box)
    assert torch.equal(actual, stored[slices(box)])


# ---- float8 with a scale for each block


def quantize(weight, block):
    """Quantize as DeepSeek-V3 does: divide each block by its scale, named `weight_scale_inv`."""
    rows, columns = (-(-n // b) for n, b in zip(weight.shape, block, strict=True))
    scales = torch.empty(rows, columns)
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    reference = torch.empty(weight.shape)
    for i in range(rows):
        for j in range(columns):
            block_slices = (
                slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]),
            )
            scales[i, j] = weight[block_slices].abs().max() / 448
            stored[block_slices] = (weight[block_slices] / scales[i, j]).to(torch.float8_e4m3fn)
            reference[block_slices] = stored[block_slices].float() * scales[i, j]
    return stored, scales, reference


@pytest.fixture
def quantized(tmp_path):
    block = (4, 3)
    weight = random({"w": (10, 7)})["w"] * torch.arange(1, 11)[:, None]
    stored, scales, reference = quantize(weight, block)
    tensors = {
        "q.weight": stored,
        "q.weight_scale_inv": scales,
        "norm.weight": torch.ones(7).bfloat16(),
    }
    folder = write_files(tmp_path / "fp8", tensors)
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    (folder / "config.json").write_text(json.dumps({"quantization_config": method}))
    return folder, tensors, reference


FP8_ROWS = (("w", "q.weight"), ("norm", "norm.weight"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_elements", [1, 10_000])
def test_float8_blocks_are_dequantized_in_float32(quantized, monkeypatch, dtype, max_elements):
    monkeypatch.setattr(hf_load, "MAX_ELEMENTS", max_elements)
    folder, _, reference = quantized
    loaded = {"w": torch.empty(10, 7, dtype=dtype), "norm": torch.empty(7)}
    report = load(folder, loaded, quantized=True, rows=FP8_ROWS)
    assert_equal(loaded, {"w": reference.to(dtype), "norm": torch.ones(7)})
    assert report.used == ("q.weight", "norm.weight") and report.unused == ()


def test_float8_rows_can_be_interleaved(quantized):
    folder, _, reference = quantized
    loaded = {"w": torch.empty(10, 7), "norm": torch.empty(7)}
    load(
        folder,
        loaded,
        quantized=True,
        rows=(Row("w", "q.weight", interleaved_heads=1), ("norm", "norm.weight")),
    )
    assert torch.equal(loaded["w"], torch.cat([reference[::2], reference[1::2]]))


def test_float8_is_read_only_on_request(quantized, tmp_path, state):
    folder, tensors, _ = quantized
    loaded = {"w": torch.empty(10, 7), "norm": torch.empty(7)}
    with pytest.raises(CheckpointError, match="set checkpoint.initial_load_in_hf_quantized = true"):
        load(folder, loaded, rows=FP8_ROWS)
    with pytest.raises(CheckpointError, match="has no block scales.*set it to false"):
        load(write(tmp_path / "plain", state), empty(state), quantized=True)
    write_files(folder, {name: t for name, t in tensors.items() if "scale" not in name})
    with pytest.raises(CheckpointError, match="float8 weights without scales.*q.weight"):
        load(folder, loaded, rows=FP8_ROWS)
    write_files(folder, tensors)
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="does not contain the block size"):
        load(folder, loaded, quantized=True, rows=FP8_ROWS)
    (folder / "config.json").write_text(
        '{"quantization_config": {"weight_block_size": [128, 128]}}'
    )
    with pytest.raises(
        CheckpointError,
        match=r"q.weight \(10, 7\) has scales of shape \(3, 3\)\. Expected \(1, 1\)",
    ):
        load(folder, loaded, quantized=True, rows=FP8_ROWS)


def test_scales_of_tensors_that_are_not_float8_are_refused(quantized):
    folder, tensors, reference = quantized
    write_files(folder, tensors | {"q.weight": reference.bfloat16()})
    with pytest.raises(CheckpointError, match="scales .* that are not float8: q.weight"):
        load(
            folder, {"w": torch.empty(10, 7), "norm": torch.empty(7)}, quantized=True, rows=FP8_ROWS
        )


# ---- damage


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def truncate_header(path):
    path.write_bytes(path.read_bytes()[:5])


def scramble_header(path):
    content = bytearray(path.read_bytes())
    content[8] = ord("x")
    path.write_bytes(content)


def overlap(path):
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    (a, x), (b, y) = sorted(
        (name, entry) for name, entry in header.items() if name != "__metadata__"
    )[:2]
    x["data_offsets"] = y["data_offsets"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    "damage", [truncate, truncate_header, scramble_header, overlap, Path.unlink]
)
def test_the_error_names_the_damaged_file(tmp_path, state, damage):
    folder = write(tmp_path / "hf", state, files=2)
    damage(folder / "model-00002-of-00002.safetensors")
    with pytest.raises(DamagedError, match="model-00002-of-00002.safetensors"):
        load(folder, empty(state))


def test_a_missing_file_is_detected_without_an_index(tmp_path, state):
    folder = write(tmp_path / "hf", state, files=3, index=False)
    (folder / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(DamagedError, match="lacks model-00003-of-00003.safetensors"):
        load(folder, empty(state))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not an index"),
        ('{"weight_map": {"lm_head.weight": "../model.safetensors"}}', "is not an index"),
        ('{"weight_map": {"lm_head.weight": "none.safetensors"}}', "lacks none.safetensors"),
        (
            '{"weight_map": {"lm_heads.weight": "model.safetensors"}}',
            "does not contain lm_heads.weight",
        ),
    ],
)
def test_a_wrong_index_is_damage(tmp_path, state, index, message):
    folder = write(tmp_path / "hf", state)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(DamagedError, match=message):
        load(folder, empty(state))


def test_unread_files_are_logged(tmp_path, state, caplog):
    """Other programs may read them: transformers prefers `model.safetensors` to an index."""
    folder = write(tmp_path / "hf", state, files=2)
    load(folder, empty(state))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    for name in ("model.safetensors", "adapter_model.safetensors"):
        save_file({"lm_head.weight": torch.zeros(9, 5)}, folder / name)
    loaded = empty(state)
    load(folder, loaded)
    assert_equal(loaded, state)
    assert "ignoring adapter_model.safetensors, model.safetensors" in caplog.text


def test_a_tensor_in_two_files_is_damage(tmp_path, state):
    folder = write(tmp_path / "hf", state)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    with pytest.raises(DamagedError, match="a.safetensors and b.safetensors both contain"):
        load(folder, empty(state))


def test_a_file_that_ends_while_it_is_read_is_damage(tmp_path):
    (tmp_path / "numbers").write_bytes(bytes(10))
    with (
        open(tmp_path / "numbers", "rb", buffering=0) as file,
        pytest.raises(DamagedError, match="ends at byte 10"),
    ):
        read_box(file, Chunk((), (2, 4), "numbers", 0, 16), torch.int16, whole((2, 4)))


def test_an_empty_folder_is_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="contains no safetensors files"):
        load(tmp_path, {})


# ---- TorchTitan and Meta


def llama(tied=False):
    args = resolve_args(LLAMA, "debugmodel", SMALL | {"enable_weight_tying": tied})
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in LLAMA.build(args).named_parameters()}
    return args, random(shapes)


def as_meta_stores(args, state):
    """Invert the permutation of transformers' conversion script."""
    heads = {"wq": args.n_heads, "wk": args.num_kv_heads}
    return {
        name: unpermute_rows(tensor, heads[name.split(".")[-2]])
        if name.split(".")[-2] in heads
        else tensor
        for name, tensor in state.items()
    }


def load_llama(loader, path, args, loaded):
    return loader(
        path, loaded, rows=LLAMA.meta_names(args), tied=LLAMA.tied(args), group=one_rank_group()
    )


OTHER_STATE = {
    "optimizer": {"state.norm.weight.exp_avg": torch.zeros(32), "param_groups.norm.weight.lr": 0.1},
    "lr_scheduler": {"last_epoch": 3},
    "dataloader": {"dp_rank_0": b"x"},
    "train_state": {"step": torch.tensor(3)},
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("prefix", ["", "model."])
def test_torchtitan_weights_are_converted_to_hugging_faces_row_order(tmp_path, prefix):
    import torch.distributed.checkpoint as dcp

    args, state = llama()
    tensors = as_meta_stores(args, state) | {"freqs_cis": torch.ones(2)}
    dcp.save(
        {prefix + name: t for name, t in tensors.items()} | OTHER_STATE,
        checkpoint_id=tmp_path / "tt",
        no_dist=True,
    )
    loaded = empty(state)
    report = load_llama(load_torchtitan, tmp_path / "tt", args, loaded)
    assert_equal(loaded, state)
    assert report.unused == ("freqs_cis",) and len(report.used) == len(state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_damaged_torchtitan_checkpoint_is_refused(tmp_path):
    import torch.distributed.checkpoint as dcp

    args, state = llama()
    dcp.save(as_meta_stores(args, state), checkpoint_id=tmp_path, no_dist=True)
    (shard,) = tmp_path.glob("*.distcp")
    content = shard.read_bytes()
    truncate(shard)
    with pytest.raises(
        DamagedError,
        match=f"{shard.name} has {len(content) - 1} bytes. Expected at least {len(content)}",
    ):
        load_llama(load_torchtitan, tmp_path, args, empty(state))
    shard.write_bytes(bytes(len(content)))
    with pytest.raises(DamagedError, match="cannot be read"):
        load_llama(load_torchtitan, tmp_path, args, empty(state))
    (tmp_path / ".metadata").write_bytes(b"\x80\x04")
    with pytest.raises(DamagedError, match=".metadata cannot be read"):
        load_llama(load_torchtitan, tmp_path, args, empty(state))
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="has no .metadata"):
        load_llama(load_torchtitan, tmp_path, args, empty(state))


def split_meta(tensors, files, embedding_dim=0):
    """Split a state dict into the files of `files` model-parallel ranks."""
    dims = {"wo": 1, "w2": 1, "tok_embeddings": embedding_dim}

    def part(name, tensor, i):
        if tensor.ndim != 2:
            return tensor
        return tensor.chunk(files, dims.get(name.split(".")[-2], 0))[i].clone()

    return [{name: part(name, tensor, i) for name, tensor in tensors.items()} for i in range(files)]


@pytest.mark.parametrize(("files", "embedding_dim"), [(1, 0), (2, 0), (4, 0), (2, 1)])
def test_meta_weights_are_converted_to_hugging_faces_row_order(tmp_path, files, embedding_dim):
    args, state = llama()
    tensors = as_meta_stores(args, state) | {"rope.freqs": torch.ones(4)}
    for i, part in enumerate(split_meta(tensors, files, embedding_dim)):
        torch.save(part, tmp_path / f"consolidated.{i:02d}.pth")
    loaded = empty(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = load_llama(load_meta, tmp_path, args, loaded)
    assert_equal(loaded, state)
    assert report.unused == ("rope.freqs",)


def test_a_single_meta_file_may_store_a_tied_output(tmp_path):
    args, state = llama(tied=True)
    tensors = as_meta_stores(args, state)
    torch.save(
        tensors | {"output.weight": tensors["tok_embeddings.weight"]},
        tmp_path / "consolidated.00.pth",
    )
    loaded = empty(state)
    load_llama(load_meta, tmp_path / "consolidated.00.pth", args, loaded)
    assert_equal(loaded, state)
    torch.save(
        tensors | {"output.weight": tensors["tok_embeddings.weight"] + 1},
        tmp_path / "consolidated.00.pth",
    )
    with pytest.raises(
        CheckpointError, match="output.weight has its own values, but this model ties it"
    ):
        load_llama(load_meta, tmp_path, args, loaded)


def test_damaged_meta_files_are_refused(tmp_path):
    args, state = llama()
    parts = split_meta(as_meta_stores(args, state), 2)
    for i, part in enumerate(parts):
        torch.save(part, tmp_path / f"consolidated.{i:02d}.pth")
    second = tmp_path / "consolidated.01.pth"
    content = second.read_bytes()
    second.write_bytes(content[:-100])
    with pytest.raises(
        DamagedError, match="consolidated.01.pth is not a zip file.*may be truncated"
    ):
        load_llama(load_meta, tmp_path, args, empty(state))
    torch.save({name: t for name, t in parts[1].items() if name != "norm.weight"}, second)
    with pytest.raises(DamagedError, match=re.escape("contain different tensors: ['norm.weight']")):
        load_llama(load_meta, tmp_path, args, empty(state))
    torch.save(parts[1] | {"norm.weight": torch.ones(3)}, second)
    with pytest.raises(DamagedError, match="norm.weight differs in shape or dtype"):
        load_llama(load_meta, tmp_path, args, empty(state))
    second.write_bytes(content)
    (tmp_path / "consolidated.00.pth").unlink()
    with pytest.raises(DamagedError, match="is incomplete: it has only consolidated.01.pth"):
        load_llama(load_meta, tmp_path, args, empty(state))
    second.unlink()
    with pytest.raises(CheckpointError, match="contains no consolidated"):
        load_llama(load_meta, tmp_path, args, empty(state))


def test_meta_weights_of_another_model_are_refused(tmp_path):
    args, state = llama()
    torch.save(as_meta_stores(args, state), tmp_path / "consolidated.00.pth")
    del state["layers.1.ffn_norm.weight"]
    with pytest.raises(CheckpointError, match="1 not in this model: layers.1.ffn_norm.weight"):
        load_llama(load_meta, tmp_path, args, empty(state))
