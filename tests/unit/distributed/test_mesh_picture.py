"""The picture of the mesh: its format, and the coordinates that it shows."""

from __future__ import annotations

import math
import re
from itertools import product

import pytest

from torchtitan_like.distributed.dims import MESH_ORDER, ParallelDims
from torchtitan_like.distributed.mesh_picture import MAX_LINES, picture

PICTURES = [
    (ParallelDims(world_size=1), None, "1 rank: nothing is sharded"),
    (ParallelDims(world_size=8, pp=2, dp_shard=2, tp=2), 4, """\
8 ranks = pp 2 x dp_shard 2 x tp 2, on 2 nodes of 4
              tp  0 1
pp 0  dp_shard 0  0 1  node 0
      dp_shard 1  2 3  node 0
pp 1  dp_shard 0  4 5  node 1
      dp_shard 1  6 7  node 1"""),
    (ParallelDims(world_size=4, pp=4), None, """\
4 ranks = pp 4
pp 0  0
pp 1  1
pp 2  2
pp 3  3"""),
    (ParallelDims(world_size=16, dp_shard=2, cp=2, tp=4), 4, """\
16 ranks = dp_shard 2 x cp 2 x tp 4, on 4 nodes of 4
        cp   0  0  0  0  1  1  1  1
        tp   0  1  2  3  0  1  2  3
dp_shard 0   0  1  2  3| 4  5  6  7  nodes 0-1
dp_shard 1   8  9 10 11|12 13 14 15  nodes 2-3"""),
    (ParallelDims(world_size=64, dp_shard=64), 8, """\
64 ranks = dp_shard 64, on 8 nodes of 8
dp_shard   0  1  2  3  4  5  6  7  8  9 10 11 12 13 ... 63
           0  1  2  3  4  5  6  7| 8  9 10 11 12 13 ... 63  nodes 0-7"""),
    (ParallelDims(world_size=64, dp_replicate=4, dp_shard=2, tp=8), 8, """\
64 ranks = dp_replicate 4 x dp_shard 2 x tp 8, on 8 nodes of 8
                        tp   0  1  2  3  4  5  6  7
dp_replicate 0  dp_shard 0   0  1  2  3  4  5  6  7  node 0
dp_replicate 0  dp_shard 1   8  9 10 11 12 13 14 15  node 1
dp_replicate 1  dp_shard 0  16 17 18 19 20 21 22 23  node 2
dp_replicate 1  dp_shard 1  24 25 26 27 28 29 30 31  node 3
dp_replicate 2  dp_shard 0  32 33 34 35 36 37 38 39  node 4
dp_replicate 2  dp_shard 1  40 41 42 43 44 45 46 47  node 5
dp_replicate 3  dp_shard 0  48 49 50 51 52 53 54 55  node 6
dp_replicate 3  dp_shard 1  56 57 58 59 60 61 62 63  node 7"""),
    (ParallelDims(world_size=1024, pp=8, dp_shard=16, tp=8), 8, """\
1024 ranks = pp 8 x dp_shard 16 x tp 8, on 128 nodes of 8
               tp     0    1    2    3    4    5    6    7
pp 0  dp_shard 0      0    1    2    3    4    5    6    7  node 0
      dp_shard 1      8    9   10   11   12   13   14   15  node 1
      dp_shard 2     16   17   18   19   20   21   22   23  node 2
      dp_shard 3     24   25   26   27   28   29   30   31  node 3
      ...
      dp_shard 15   120  121  122  123  124  125  126  127  node 15
pp 1  dp_shard 0    128  129  130  131  132  133  134  135  node 16
      dp_shard 1    136  137  138  139  140  141  142  143  node 17
      dp_shard 2    144  145  146  147  148  149  150  151  node 18
      dp_shard 3    152  153  154  155  156  157  158  159  node 19
      ...
      dp_shard 15   248  249  250  251  252  253  254  255  node 31
...
pp 7  dp_shard 0    896  897  898  899  900  901  902  903  node 112
      dp_shard 1    904  905  906  907  908  909  910  911  node 113
      dp_shard 2    912  913  914  915  916  917  918  919  node 114
      dp_shard 3    920  921  922  923  924  925  926  927  node 115
      ...
      dp_shard 15  1016 1017 1018 1019 1020 1021 1022 1023  node 127"""),
]  # fmt: skip


@pytest.mark.parametrize(("dims", "ranks_per_node", "text"), PICTURES)
def test_picture_of_a_layout(dims: ParallelDims, ranks_per_node: int | None, text: str) -> None:
    assert "\n".join(picture(dims, ranks_per_node)) == text


def layouts(world_size: int) -> list[ParallelDims]:
    """Return every layout of a world whose size is a power of two."""
    sizes = [2**n for n in range(world_size.bit_length())]
    return [
        ParallelDims(world_size, **dict(zip(MESH_ORDER, degrees, strict=True)))
        for degrees in product(sizes, repeat=len(MESH_ORDER))
        if math.prod(degrees) == world_size
    ]


@pytest.mark.parametrize("world_size", [1, 2, 16, 64, 1024])
def test_every_picture_fits_a_screen(world_size: int) -> None:
    for dims in layouts(world_size):
        lines = picture(dims, 8)
        assert len(lines) <= MAX_LINES and max(map(len, lines)) <= 130, lines
        assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("dims", layouts(16), ids=str)
def test_ranks_are_at_their_mesh_coordinates(dims: ParallelDims) -> None:
    """The labels of its row and column are the coordinates of a rank."""
    _, *lines = picture(dims)
    column_dims = [name for name in ("cp", "tp") if getattr(dims, name) > 1]
    column_dims = (
        column_dims
        or [name for name in ("dp_replicate", "dp_shard") if getattr(dims, name) > 1][-1:]
    )
    num_columns = math.prod(getattr(dims, name) for name in column_dims)
    headers = {line.split()[0]: line.split()[1:] for line in lines[: len(column_dims)]}
    assert list(headers) == column_dims
    ranks_in_order, pp = [], 0
    for line in lines[len(column_dims) :]:
        words = line.split()
        label, ranks = " ".join(words[:-num_columns]), words[-num_columns:]
        row_labels = {name: int(index) for name, index in re.findall(r"(\w+) (\d+)", label)}
        pp = row_labels.setdefault("pp", pp)
        for column, rank in enumerate(map(int, ranks)):
            column_labels = {name: int(indices[column]) for name, indices in headers.items()}
            assert (row_labels | column_labels).items() <= {
                name: dims.coordinate(name, rank) for name in MESH_ORDER
            }.items()
            ranks_in_order.append(rank)
    assert ranks_in_order == list(range(16))
