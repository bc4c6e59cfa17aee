"""Measurements made up from a known device give its description, and bad ones are explained."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.calibrate import (
    Attention,
    Collective,
    Kernels,
    Measured,
    Product,
    Sizes,
    _model_operators,
    describe_cpu,
    describe_gpu,
    description_text,
    files_of,
    measure_machine,
    network_gb_s,
)
from benchmarks.calibrate import main as calibrate_main
from benchmarks.fit_runs import main as fit_main
from torchtitan_like.cli import main as titan
from torchtitan_like.plan.clusters import Cluster, load_cluster
from torchtitan_like.plan.durations import item_seconds
from torchtitan_like.plan.gpus import COLLECTIVES, Gpu, load_gpu
from torchtitan_like.plan.record import Group, WorkItem

CLUSTER = replace(load_cluster("default"), matmul_factor=1.0)
CPU = Gpu(
    key="known",
    name="Known",
    memory_gib=16.0,
    hbm_tb_s=0.02,
    multiprocessors=0,
    link_gb_s=0.5,
    cublas_workspace_mib=0,
    peak_tflops={"float32": 0.08, "bfloat16": 0.2},
    device_type="cpu",
    outside_gib=0.3,
    launch_us=5.0,
    host_operator_us=0.0,
    attention={1: {"forward": (0.7, 1.5, 30.0), "backward": (0.6, 4.0, 0.0)}},
    collectives={
        "all_gather": (300.0, 0.5),
        "all_reduce": (900.0, 0.7),
        "reduce_scatter": (1000.0, 0.4),
        "message": (200.0, 0.9),
    },
)
SHAPES = ((1024, 512, 512), (1024, 512, 1536), (2048, 256, 768))
OPS = {
    "all_gather": "allgather_base",
    "all_reduce": "allreduce",
    "reduce_scatter": "reduce_scatter_base",
    "message": "send",
}


def product(shape: tuple[int, int, int], dtype: str, device: Gpu, cluster: Cluster) -> Product:
    """Return the products of a linear layer as a device would measure them."""
    empty = Product(shape, dtype, 0.0)
    items = [
        WorkItem("matmul", "mm", 0, "", "forward", flops=empty.flops // 3, shapes=each, dtype=dtype)
        for each in empty.operands
    ]
    return empty._replace(seconds=sum(item_seconds(item, device, cluster) for item in items))


def attention_item(pass_: str, seq: int, dim: int) -> WorkItem:
    tensor = (1, 8, seq, dim)
    is_backward = pass_ == "backward"
    return WorkItem(
        "attention",
        f"attention_{pass_}" if is_backward else "attention",
        0,
        "",
        "forward",
        flops=(10 if is_backward else 4) * 8 * seq**2 * dim,
        shapes=(tensor,) * 4,
        dtype="float32",
        is_causal=True,
    )


def collective_item(op: str, num_bytes: int, size: int) -> WorkItem:
    group = Group("world", size, 1)
    return WorkItem("collective", op, 0, "", "forward", num_bytes=num_bytes, group=group)


def measured_on(device: Gpu, cluster: Cluster, num_ranks: int, **changes: Any) -> Measured:
    """Return what a device would measure if all of its work took the predicted time."""

    def seconds(item: WorkItem) -> float:
        return item_seconds(item, device, cluster)

    kernels = WorkItem("memory", "add", 0, "", "forward", num_bytes=3 * 2**26)
    collectives = {
        kind: Collective(
            *((size, seconds(collective_item(op, size, num_ranks))) for size in (2**12, 2**23))
        )
        for kind, op in OPS.items()
        if num_ranks > 1
    }
    attention = {
        pass_: tuple(
            Attention(
                flops * dim * 4 * seq**2,  # half of the scores of 8 heads
                4 * seq**2,
                8 * seq,
                seconds(attention_item(pass_, seq, dim)),
            )
            for seq in (256, 1024)
            for dim in (16, 64)
        )
        for pass_, flops in (("forward", 4), ("backward", 10))
    }
    fields: dict[str, Any] = {
        "products": tuple(
            product(shape, dtype, device, cluster)
            for dtype in device.peak_tflops
            if dtype in ("float32", "bfloat16")
            for shape in SHAPES
        ),
        "kernels": Kernels(3 * 2**26, 1, seconds(kernels)),
        "operator": device.launch_us * 1e-6,
        "attention": attention if device.device_type == "cpu" else {},
        "collectives": collectives,
        "num_ranks": num_ranks,
        "ranks_per_node": num_ranks,
        "memory_gib": device.memory_gib,
        "outside_gib": device.outside_gib,
    }
    return Measured(**{**fields, **changes})


def test_a_cpu_is_found_from_its_measurements() -> None:
    found = describe_cpu(measured_on(CPU, CLUSTER, num_ranks=4), "known", "Known")
    for name, value in vars(CPU).items():
        other = getattr(found, name)
        if isinstance(value, dict):
            if name == "attention":
                value, other = value[1], other[1]
            assert other.keys() == value.keys()
            for key in value:
                assert other[key] == pytest.approx(value[key], rel=2e-3), (name, key)
        elif isinstance(value, float):
            assert other == pytest.approx(value, rel=2e-3), name
        else:
            assert other == value, name


def test_the_shares_of_gpus_are_found_from_their_measurements() -> None:
    sheet = load_gpu("h100-96g")
    truth = replace(
        sheet,
        matmul_share={"bfloat16": 0.55, "float8": 0.5, "float32": 0.6},
        memory_share=0.7,
        host_operator_us=30.0,
    )
    cluster = replace(CLUSTER, inter_node_gb_s=20)
    num_ranks = 16
    reduces = Collective(
        *(
            (size, item_seconds(collective_item("allreduce", size, num_ranks), truth, cluster))
            for size in (2**16, 2**30)
        )
    )
    shapes = ((8192, 4096, 4096), (8192, 4096, 14336))
    kernel = WorkItem("memory", "add", 0, "", "forward", num_bytes=3 * 2**30)
    measured = measured_on(
        truth,
        cluster,
        num_ranks,
        products=tuple(
            product(shape, dtype, truth, cluster)
            for dtype in ("bfloat16", "float32")
            for shape in shapes
        ),
        kernels=Kernels(3 * 2**30, 1, item_seconds(kernel, truth, cluster)),
        operator=30e-6,
        collectives={"all_reduce": reduces},
        ranks_per_node=8,
    )
    found = describe_gpu(measured, replace(sheet, matmul_share={"float8": 0.5}), "own")
    assert dict(found.matmul_share) == pytest.approx(dict(truth.matmul_share), rel=0.01)
    assert found.memory_share == pytest.approx(0.7, rel=0.01)
    assert found.host_operator_us == pytest.approx(30)
    assert network_gb_s(measured) == pytest.approx(20, rel=0.02)
    assert network_gb_s(replace(measured, collectives={})) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"products": (Product((64, 32, 32), "float32", 1e-6),)},
            "matrix products took as long as tiny operators",
        ),
        ({"kernels": Kernels(2**20, 100, 1e-4)}, "kernels took as long as tiny operators"),
        (
            {"collectives": {"all_gather": Collective((2**12, 2e-3), (2**23, 1e-3))}},
            "all_gather of 4,096 B took as long as all_gather of 8,388,608 B",
        ),
        (
            {
                "attention": {
                    "forward": (Attention(1e8, 1e6, 8, 2e-3), Attention(4e8, 1e6, 8, 1e-3))
                }
            },
            "attention with small heads took as long as",
        ),
    ],
)
def test_measurements_of_a_busy_machine_that_contradict_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        describe_cpu(measured_on(CPU, CLUSTER, 2, **changes), "known", "Known")
    assert "measure again" in str(error.value)


def test_the_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    for num_ranks in (1, 2):
        files = files_of(measured_on(CPU, CLUSTER, num_ranks), None, tmp_path / "own.toml")
        for path, text in files.items():
            path.write_text(text)
        cluster = load_cluster(str(tmp_path / "own.toml"))
        assert cluster.gpu == str(tmp_path / "own_device.toml")
        assert 0 < cluster.error_percent < 100 and cluster.error_source
        assert load_gpu(cluster.gpu).peak_tflops == CPU.peak_tflops
        assert load_gpu(cluster.gpu).collectives.keys() == set(COLLECTIVES if num_ranks > 1 else ())
    gpu = load_gpu("a100-80g")
    measured = replace(measured_on(gpu, CLUSTER, 1), collectives={})
    for path, text in files_of(measured, gpu, tmp_path / "g.toml").items():
        path.write_text(text)
    cluster = load_cluster(str(tmp_path / "g.toml"))
    assert load_gpu(cluster.gpu).peak_tflops == gpu.peak_tflops
    assert cluster.matmul_factor == 1 and "no step was measured" in cluster.error_source


def test_operators_of_a_model_are_counted_and_timed() -> None:
    number, work = _model_operators("cpu")
    assert number > 300
    work()


def test_this_machine_is_measured() -> None:
    tiny = Sizes(((64, 32, 32),), (torch.float32, torch.bfloat16), (64, 32), (2**10, 2**12))
    tiny = tiny._replace(attention=((16, 4), (32, 8)))
    reported: list[tuple[int, int]] = []
    measured = measure_machine(
        "cpu", tiny, 0.05, lambda name, done, total, seconds: reported.append((done, total))
    )
    assert reported == [(done, 8) for done in range(9)]
    assert [(p.shape, p.dtype) for p in measured.products] == [
        ((64, 32, 32), "float32"),
        ((64, 32, 32), "bfloat16"),
    ]
    assert measured.kernels.number > 10 and measured.kernels.num_bytes > 10 * 64 * 32 * 4
    times = [p.seconds for p in measured.products] + [measured.kernels.seconds, measured.operator]
    times += [each.seconds for pair in measured.attention.values() for each in pair]
    assert len(times) == 8 and min(times) > 0
    assert measured.collectives == {} and measured.num_ranks == measured.ranks_per_node == 1
    assert 0.05 < measured.outside_gib < measured.memory_gib


# ---- plans with a calibrated file

TINY = "--model.name llama3 --model.flavor debugmodel --model.args.n_layers 1 --model.args.dim 32"
TINY += " --model.args.n_heads 2 --training.seq_len 32 --training.mixed_precision_param float32"


def test_a_plan_with_a_calibrated_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = files_of(measured_on(CPU, CLUSTER, 2), None, tmp_path / "own.toml")
    for path, text in files.items():
        path.write_text(text)
    Path("x.toml").write_text("")
    words = ["plan", "x.toml", "--world-size", "2", "--cluster", "own.toml", *TINY.split()]
    assert titan([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["outside_allocator_bytes"] == round(CPU.outside_gib * 2**30)
    (rank,) = plan["ranks"]
    assert rank["reserved"] == sum(rank["by_category"].values())  # no rounding, no pools
    time = plan["time"]
    band = load_cluster("own.toml").error_percent
    assert time["error_percent"] == band
    assert any(note.startswith("unvalidated") for note in time["notes"])
    assert any("CPU seconds" in note for note in time["notes"])
    # A rank does its own communication: no part of it is hidden.
    assert time["parts"]["exposed: data parallel"] > 6 * 300e-6
    assert sum(time["parts"].values()) == pytest.approx(time["seconds"])

    assert titan(words) == 0
    out = capsys.readouterr().out
    assert "CUDA" not in out and "other streams' pools" not in out
    assert "unvalidated" in out and f"each +-{band:g} %" in out


def test_collectives_that_were_not_measured_have_no_time() -> None:
    alone = replace(CPU, collectives={})
    item = collective_item("allreduce", 2**20, 2)
    with pytest.raises(ValueError, match="no measured collectives.*calibrate on several ranks"):
        item_seconds(item, alone, CLUSTER)
    assert item_seconds(collective_item("allreduce", 2**20, 1), alone, CLUSTER) == 0


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (calibrate_main, "-o own.json", "own.json: expected a .toml file in an existing folder"),
        (calibrate_main, "-o none/own.toml", "expected a .toml file in an existing folder"),
        (calibrate_main, "-o own.toml --gpu h100", "there is no GPU 'h100'"),
        (calibrate_main, "-o own.toml --gpu known.toml", "known.toml describes a CPU"),
        (fit_main, "run -o own.toml", "has no device: give --gpu NAME"),
        (fit_main, "run -o own.toml --gpu h100-80g", "run is not the folder of a run"),
        pytest.param(
            calibrate_main,
            "-o own.toml --gpu h100-80g",
            "finds no GPU: leave --gpu out",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU"),
        ),
    ],
)
def test_bad_arguments_end_with_2_and_write_nothing(
    main: Callable[[Sequence[str]], None],
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    files = files_of(measured_on(CPU, CLUSTER, 1), None, tmp_path / "known.toml")
    Path("known.toml").write_text(files[tmp_path / "known_device.toml"])
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["known.toml"]


def test_a_description_is_read_as_it_was_written(tmp_path: Path) -> None:
    gpu = load_gpu("h100-80g")
    path = tmp_path / "h100-80g.toml"
    path.write_text(description_text(gpu, "of a data sheet"))
    assert load_gpu(str(path)) == gpu
