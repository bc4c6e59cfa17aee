"""Durations of work items agree with sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchtitan_like.plan.clusters import Cluster
from torchtitan_like.plan.durations import (
    KERNEL_SHARES,
    LINK_SHARE,
    NETWORK_SHARE,
    RAMP_BYTES,
    fill_share,
    item_seconds,
    mfu_peak,
    traffic,
)
from torchtitan_like.plan.gpus import Gpu
from torchtitan_like.plan.record import Group, WorkItem

GPU = Gpu("toy", "Toy", 80, 1.0, 4, 100, 0, {"bfloat16": 100.0, "float8": 200.0}, memory_share=0.5)
LAUNCH = GPU.launch_us * 1e-6
RAMP = RAMP_BYTES / 2  # of bfloat16, numbers
CLUSTER = Cluster("toy", "Toy", "", 8, 50, 10, 0.5, 0.0)


def matmul(m: int, k: int, n: int, dtype: str = "bfloat16") -> WorkItem:
    return WorkItem(
        "matmul",
        "mm",
        0,
        "layers.0",
        "forward",
        flops=2 * m * k * n,
        num_bytes=2 * (m * k + k * n + m * n),
        shapes=((m, k), (k, n)),
        dtype=dtype,
    )


def test_a_matmul_takes_its_flops_at_the_rate_of_full_waves_and_its_ramp() -> None:
    # 32 tiles of 128 x 256 are 8 full waves of 4 multiprocessors. k / (k + 256) = 0.9.
    item = matmul(1024, 2304, 1024)
    assert item_seconds(item, GPU, CLUSTER) == pytest.approx(
        item.flops / (100e12 * 0.5 * 0.9) + LAUNCH
    )


def test_float8_doubles_the_rate_and_an_unknown_dtype_is_explained() -> None:
    # So 2 * 2,304 products take as long as 2,304, and the ramp is as long as of 512.
    seconds = item_seconds(matmul(1024, 2304, 1024), GPU, CLUSTER)
    float8 = matmul(1024, 4608, 1024, "float8_e4m3fn")
    assert item_seconds(float8, GPU, CLUSTER) == pytest.approx(seconds)
    with pytest.raises(ValueError, match="no matrix products in float64.*bfloat16, float8"):
        item_seconds(matmul(1024, 256, 1024, "float64"), GPU, CLUSTER)


def test_float8_is_slower_where_partial_sums_are_added_in_float32() -> None:
    item = matmul(1024, 2304, 1024, "float8_e5m2")
    fast = item_seconds(item, GPU, CLUSTER) - LAUNCH
    promoting = item._replace(promotes=True)
    for share in (1.0, 0.8):
        seconds = item_seconds(promoting, replace(GPU, promoting_share=share), CLUSTER) - LAUNCH
        assert seconds == pytest.approx(fast / share)


def test_a_partial_wave_takes_as_long_as_a_full_one() -> None:
    # 33 tiles of 128 x 256 on 4 multiprocessors: 9 waves, of which 33/36 are filled.
    assert fill_share(((33 * 128, 256), (256, 256)), 4, "bfloat16") == pytest.approx(33 / 36 / 2)
    assert fill_share(((32 * 128, 256), (256, 256)), 4, "bfloat16") == pytest.approx(1 / 2)


def test_a_product_with_few_tiles_splits_its_k() -> None:
    # One tile of 128 x 128 on 4 multiprocessors: each has a quarter of k.
    shapes = (128, 16384), (16384, 128)
    assert fill_share(shapes, 4, "bfloat16") == pytest.approx(0.85 * 4096 / (4096 + RAMP))
    assert fill_share(shapes, 1, "bfloat16") == pytest.approx(0.92 * 16384 / (16384 + RAMP))
    # Short parts take as long as loading their tiles.
    assert fill_share(((128, 256), (256, 128)), 128, "bfloat16") < 0.02


def test_the_scales_of_float8_and_an_added_bias_are_no_operands() -> None:
    item = matmul(1024, 2304, 1024)
    seconds = item_seconds(item, GPU, CLUSTER)
    scaled = item._replace(shapes=(*item.shapes, (1024, 1), (1, 1024)))
    assert item_seconds(scaled, GPU, CLUSTER) == seconds
    added = item._replace(op="addmm", shapes=((1024,), *item.shapes))
    assert item_seconds(added, GPU, CLUSTER) == seconds


def test_a_thin_matmul_takes_the_time_of_its_bytes() -> None:
    item = matmul(1, 8192, 8192)
    assert item_seconds(item, GPU, CLUSTER) == pytest.approx(item.num_bytes / 0.5e12 + LAUNCH)


@pytest.mark.parametrize(
    ("grouped", "single"),
    [
        # 8 groups of 256 rows; then the gradient of the weights, a sum over each group's rows.
        (((2048, 512), (8, 512, 768), (8,)), ((256, 512), (512, 768))),
        (((512, 2048), (2048, 768), (8,)), ((512, 256), (256, 768))),
    ],
)
def test_a_grouped_product_is_a_slower_batch_of_equal_ones(
    grouped: tuple[tuple[int, ...], ...], single: tuple[tuple[int, ...], ...]
) -> None:
    flops = 2 * 2048 * 512 * 768
    item = matmul(2048, 512, 768)._replace(op="_grouped_mm", flops=flops, shapes=grouped)
    batch = item._replace(op="bmm", shapes=tuple((8, *shape) for shape in single))
    seconds = (item_seconds(item, GPU, CLUSTER) - LAUNCH) * KERNEL_SHARES["_grouped_mm"]
    assert seconds == pytest.approx(item_seconds(batch, GPU, CLUSTER) - LAUNCH)
    # A rank with as many rows in more groups fills fewer of its tiles.
    rows, groups, ends = grouped
    more = (64, *groups[1:]) if len(groups) == 3 else groups
    narrow = item._replace(shapes=(rows, more, (64,)))
    assert item_seconds(narrow, GPU, CLUSTER) > 1.2 * item_seconds(item, GPU, CLUSTER)


def attention(queries: int, keys: int, *, is_causal: bool) -> WorkItem:
    shapes = ((1, 8, queries, 128), (1, 8, keys, 128), (1, 8, keys, 128))
    flops = 4 * 8 * queries * keys * 128
    return WorkItem(
        "attention",
        "_scaled_dot_product_flash_attention",
        0,
        "layers.0",
        "forward",
        flops=flops,
        shapes=shapes,
        dtype="bfloat16",
        is_causal=is_causal,
    )


@pytest.mark.parametrize(
    ("queries", "keys", "is_causal", "share"),
    [(4096, 4096, True, 1 / 2), (4096, 4096, False, 1), (1024, 4096, True, 1 - 1 / 8)],
)
def test_attention_counts_what_the_queries_see(
    queries: int, keys: int, is_causal: bool, share: float
) -> None:
    whole = item_seconds(attention(queries, keys, is_causal=False), GPU, CLUSTER) - LAUNCH
    seconds = item_seconds(attention(queries, keys, is_causal=is_causal), GPU, CLUSTER) - LAUNCH
    assert seconds == pytest.approx(share * whole)


@pytest.mark.parametrize(
    ("head", "share"), [(16, 0.25 / 4), (64, 0.25), (96, 0.5 * 96 / 128), (128, 0.5), (256, 0.5)]
)
def test_heads_are_padded_to_the_next_size_with_a_rate(head: int, share: float) -> None:
    passes = ("forward", "backward")
    rates = {
        size: dict.fromkeys(passes, (share, 0.0, 0.0)) for size, share in ((64, 0.25), (128, 0.5))
    }
    gpu = replace(GPU, attention=rates)
    tensor = (1, 8, 1024, head)
    item = attention(1024, 1024, is_causal=False)._replace(shapes=(tensor,) * 4)
    for op in ("attention", "attention_backward"):
        seconds = item_seconds(item._replace(op=op), gpu, CLUSTER) - LAUNCH
        assert seconds == pytest.approx(item.flops / (100e12 * 0.5 * share))
    # Of more keys than queries, only FlashAttention aligns the mask.
    longer = attention(1024, 4096, is_causal=True)
    assert item_seconds(longer, gpu, CLUSTER) == item_seconds(longer, GPU, CLUSTER)


def kernel(op: str, *sizes: int, writes: int = 0) -> WorkItem:
    return WorkItem(
        "memory",
        op,
        0,
        "layers.0",
        "forward",
        num_bytes=sum(sizes),
        reads=tuple(enumerate(sizes, start=1)),
        writes=((1, writes),) if writes else (),
    )


def test_kernels_read_and_write_what_they_touch() -> None:
    assert traffic(kernel("mul", 100, 100)) == 200
    assert traffic(kernel("exp_", 100, writes=100)) == 200  # read and written
    assert traffic(kernel("copy_", 100, 50, writes=100)) == 150  # the target is not read
    assert traffic(kernel("embedding", 1000, 8, 16)) == 48  # rows of the table, not all of it
    assert traffic(kernel("index_select", 1000, 8, 16)) == 48


def test_kernels_that_read_with_strides_reach_less_of_the_bandwidth() -> None:
    plain, slow = (item_seconds(kernel(op, 10**9), GPU, CLUSTER) - LAUNCH for op in ("mul", "roll"))
    assert slow == pytest.approx(plain / KERNEL_SHARES["roll"])


def collective(op: str, size: int, stride: int, num_bytes: int = 2**30) -> WorkItem:
    group = Group("group", size, stride)
    return WorkItem("collective", op, 0, "", "forward", num_bytes=num_bytes, group=group)


def test_a_ring_on_a_node_sends_all_but_a_rank_s_part_over_its_links() -> None:
    gather = item_seconds(collective("allgather_base", 8, 1), GPU, CLUSTER)
    assert gather == pytest.approx(2**30 * 7 / 8 / (100e9 * LINK_SHARE) + (8.4 + 7 * 3.4) * 1e-6)
    reduce = item_seconds(collective("allreduce", 8, 1), GPU, CLUSTER)
    assert reduce == pytest.approx(
        2 * 2**30 * 7 / 8 / (100e9 * LINK_SHARE) + (8.4 + 14 * 3.4) * 1e-6
    )


def test_a_ring_across_nodes_shares_the_cards_of_its_ranks() -> None:
    network = 50e9 * NETWORK_SHARE
    # One rank of each of 16 nodes: one card.
    alone = item_seconds(collective("allgather_base", 16, 8), GPU, CLUSTER)
    assert alone == pytest.approx(2**30 * 15 / 16 / network + (8.4 + 15 * 9.6) * 1e-6)
    # Two ranks of each node: two cards, and hops inside.
    pairs = item_seconds(collective("allgather_base", 16, 4), GPU, CLUSTER)
    assert pairs == pytest.approx(
        2**30 * 15 / 16 / (2 * network) + (8.4 + 8 * 3.4 + 7 * 9.6) * 1e-6
    )


@pytest.mark.parametrize("op", ["all_to_all_single", "alltoall_base"])
def test_an_all_to_all_is_limited_by_the_slower_of_links_and_network_cards(op: str) -> None:
    link, card = 100e9 * LINK_SHARE, 50e9 * NETWORK_SHARE
    inside = item_seconds(collective(op, 8, 1), GPU, CLUSTER)
    assert inside == pytest.approx(2**30 * 7 / 8 / link + (8.4 + 3.4) * 1e-6)
    # Of 16 parts, 8 go to the other node, through a card for each rank.
    two_nodes = item_seconds(collective(op, 16, 1), GPU, CLUSTER)
    assert two_nodes == pytest.approx(2**30 * 8 / 16 / card + (8.4 + 9.6) * 1e-6)
    # Neighbors with expert tensor parallelism of 4: two ranks on each node.
    spread = item_seconds(collective(op, 4, 4), GPU, CLUSTER)
    assert spread == pytest.approx(2**30 * 2 / 4 / card + (8.4 + 9.6) * 1e-6)


def test_a_small_all_reduce_takes_a_tree_and_one_rank_takes_no_time() -> None:
    small = item_seconds(collective("allreduce", 512, 1, num_bytes=4), GPU, CLUSTER)
    assert small == pytest.approx((4.4 + 2 * (7 * 0.52 + 6 * 5.0)) * 1e-6, rel=1e-3)
    assert item_seconds(collective("allreduce", 1, 0), GPU, CLUSTER) == 0


def test_shares_of_the_gpu_and_the_factor_of_the_cluster_scale_what_they_are_for() -> None:
    product, float8 = matmul(1024, 2304, 1024), matmul(1024, 2304, 1024, "float8_e4m3fn")
    gpu = replace(GPU, matmul_share={"bfloat16": 0.8})
    fast = replace(CLUSTER, matmul_factor=1.0)

    def ratio(item: WorkItem, gpu: Gpu, cluster: Cluster) -> float:
        return (item_seconds(item, gpu, cluster) - LAUNCH) / (
            item_seconds(item, GPU, CLUSTER) - LAUNCH
        )

    for item in (product, attention(1024, 1024, is_causal=True)):
        assert ratio(item, gpu, CLUSTER) == pytest.approx(1 / 0.8)
        assert ratio(item, GPU, fast) == pytest.approx(1 / 2)
    assert ratio(float8, gpu, CLUSTER) == 1
    assert ratio(kernel("mul", 10**9), gpu, fast) == 1
    assert ratio(kernel("mul", 10**9), replace(GPU, memory_share=1.0), CLUSTER) == pytest.approx(
        1 / 2
    )


CPU = replace(
    GPU,
    multiprocessors=0,
    device_type="cpu",
    peak_tflops={"float32": 0.1, "bfloat16": 0.2},
    attention={1: {"forward": (0.5, 2.0, 3.0), "backward": (0.25, 4.0, 5.0)}},
    collectives={
        "all_gather": (100.0, 1.0),
        "all_reduce": (200.0, 2.0),
        "reduce_scatter": (300.0, 3.0),
        "message": (400.0, 4.0),
    },
)


def test_a_cpu_has_no_tiles_and_no_slower_kernels() -> None:
    item = matmul(100, 100, 100, "float32")._replace(num_bytes=0)
    assert item_seconds(item, CPU, CLUSTER) == pytest.approx(2e6 / (0.1e12 * 0.5) + LAUNCH)
    assert item_seconds(kernel("roll", 100), CPU, CLUSTER) == item_seconds(
        kernel("mul", 100), CPU, CLUSTER
    )


def test_a_cpu_spends_time_on_each_score_and_row_of_attention() -> None:
    item = attention(64, 64, is_causal=True)._replace(dtype="float32")
    scores, rows = 8 * 64 * 64 / 2, 8 * 64
    forward = item.flops / 2 / (0.1e12 * 0.5 * 0.5) + scores * 2e-9 + rows * 3e-9
    assert item_seconds(item, CPU, CLUSTER) == pytest.approx(forward + LAUNCH)
    backward = item._replace(op="attention_backward", shapes=(item.shapes[0], *item.shapes))
    expected = item.flops / 2 / (0.1e12 * 0.5 * 0.25) + scores * 4e-9 + rows * 5e-9
    assert item_seconds(backward, CPU, CLUSTER) == pytest.approx(expected + LAUNCH)


@pytest.mark.parametrize(
    ("op", "seconds"),
    [
        ("allgather_base", 100e-6 + 3e9 / 1e9),
        ("all_gather_into_tensor", 100e-6 + 3e9 / 1e9),
        ("all_reduce", 200e-6 + 3e9 / 2e9),
        ("reduce_scatter_tensor", 300e-6 + 3e9 / 3e9),
        ("send", 400e-6 + 4e9 / 4e9),
        ("recv_", 400e-6 + 4e9 / 4e9),
    ],
)
def test_measured_collectives_take_their_own_rates(op: str, seconds: float) -> None:
    group = Group("world", 4, 1)
    item = WorkItem("collective", op, 0, "", "forward", num_bytes=4 * 10**9, group=group)
    assert item_seconds(item, CPU, CLUSTER) == pytest.approx(seconds)


def test_mfu_is_a_share_of_bfloat16_on_gpus_and_of_its_own_dtype_on_cpus() -> None:
    assert mfu_peak("float32", GPU) == 100e12
    assert mfu_peak("float32", CPU) == 0.1e12
    with pytest.raises(ValueError, match="no matrix products in float64"):
        mfu_peak("float64", CPU)
