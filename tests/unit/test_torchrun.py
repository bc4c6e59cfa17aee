"""torchtitan_like.torchrun: its rendezvous, and its exit code."""

from __future__ import annotations

import pytest
from torch.distributed import run as torch_run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api as launcher_api

from torchtitan_like.process_start import LAUNCHER
from torchtitan_like.torchrun import (
    EXIT_BARRIER_S,
    main,
    set_rendezvous,
)
from torchtitan_like.util.exit_codes import early_code


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({75}, 75),
        ({130, 75}, 130),
        ({78, 75}, 78),
        ({74, 75}, 74),
        ({1, 75}, None),
        ({-9, 75}, None),
        ({70}, None),
    ],
)
def test_the_codes_of_ranks_determine_the_exit_code(codes: set[int], expected: int | None) -> None:
    assert early_code(codes) == expected


@pytest.mark.parametrize(
    ("options", "backend", "endpoint"),
    [
        ([], "loopback", "127.0.0.1:0"),
        (["--standalone"], "loopback", "127.0.0.1:0"),
        (
            ["--nnodes=1", "--rdzv_backend=c10d", "--rdzv_endpoint=node-1:1"],
            "loopback",
            "127.0.0.1:0",
        ),
        (["--nnodes=2", "--rdzv_backend=c10d", "--rdzv_endpoint=node-1:1"], "c10d", "node-1:1"),
        (["--nnodes=1:2", "--rdzv_backend=c10d", "--rdzv_endpoint=node-1:1"], "c10d", "node-1:1"),
        (["--nnodes=2", "--node_rank=1", "--master_addr=node-1"], "static", "node-1:29500"),
        (
            ["--nnodes=2", "--node_rank=1", "--master_addr=node-1", "--master_port=7"],
            "static",
            "node-1:7",
        ),
    ],
)
def test_the_rendezvous_of_torchrun_is_replaced(
    options: list[str], backend: str, endpoint: str
) -> None:
    arguments = torch_run.parse_args([*options, "program.py"])
    set_rendezvous(arguments)
    assert arguments.rdzv_backend == f"torchtitan_like_{backend}"
    assert arguments.rdzv_endpoint == endpoint and not arguments.standalone
    assert ("rank=1" in arguments.rdzv_conf) == (backend == "static")


def test_other_backends_are_not_replaced() -> None:
    arguments = torch_run.parse_args(
        ["--nnodes=2", "--rdzv_backend=etcd", "--rdzv_endpoint=etcd:1", "program.py"]
    )
    set_rendezvous(arguments)
    assert (arguments.rdzv_backend, arguments.rdzv_endpoint) == ("etcd", "etcd:1")


def test_launchers_do_not_wait_long_for_one_that_got_a_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agents = []
    monkeypatch.setattr(launcher_api, "LocalElasticAgent", LocalElasticAgent)
    monkeypatch.setattr(torch_run, "run", lambda _: agents.append(launcher_api.LocalElasticAgent))
    monkeypatch.setenv(LAUNCHER, "")
    assert main(["--nnodes=2", "--node_rank=0", "--master_addr=node-1", "program.py"]) == 0
    assert [agent.keywords for agent in agents] == [{"exit_barrier_timeout": EXIT_BARRIER_S}]
