"""find_bad_nodes.py reports broken and unreachable nodes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from torchtitan_like.slurm.templates import find_bad_nodes


def cluster(
    broken: set[str] = frozenset(), unreachable: set[str] = frozenset(), calls: list | None = None
):
    """Return a fake srun. `broken` nodes fail their check. No node reaches `unreachable` nodes."""

    def run(command: Sequence[str], env: dict[str, str]) -> tuple[bool, str]:
        hosts = (
            next(word for word in command if word.startswith("--nodelist="))
            .partition("=")[2]
            .split(",")
        )
        if calls is not None:
            calls.append((hosts, list(command), env))
        if "--ranks" in command:
            return not unreachable & set(hosts), ""
        return not broken & set(hosts), f"starting\n{hosts[0]} is BAD: Xid 79"

    return run


@pytest.mark.parametrize(
    ("broken", "unreachable", "expected"),
    [
        (set(), set(), "all 5 nodes are good"),
        ({"n2"}, set(), "--exclude=n2"),
        (set(), {"n3"}, "--exclude=n3"),
        ({"n1"}, {"n5"}, "--exclude=n1,n5"),
        (set(), {"n1"}, "--exclude=n1"),
    ],
)
def test_only_bad_nodes_are_excluded(
    capsys, broken: set[str], unreachable: set[str], expected: str
) -> None:
    code = find_bad_nodes.main(["--hosts", "n[1-5]"], cluster(broken, unreachable))
    assert capsys.readouterr().out.splitlines()[-1] == expected
    assert code == int(bool(broken or unreachable))


def test_no_node_is_excluded_if_the_network_is_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        find_bad_nodes.main(["--hosts", "n[1-4]"], cluster(unreachable={"n1", "n2", "n3", "n4"}))
        == 2
    )
    assert "No pair of nodes reaches each other" in capsys.readouterr().err


def test_commands_of_srun() -> None:
    calls: list = []
    find_bad_nodes.main(
        ["--hosts", "n[1-2]", "--gpus", "8", "--", "--cpus-per-task=4"], cluster(calls=calls)
    )
    hosts, command, _ = calls[0]
    assert command[:5] == ["srun", "--overlap", f"--nodelist={hosts[0]}", "--nodes=1", "--ntasks=1"]
    assert "--cpus-per-task=4" in command and command[-2:] == ["--gpus", "8"]
    assert calls[-1][2] == {"MASTER_ADDR": "n1", "MASTER_PORT": "29600"}
