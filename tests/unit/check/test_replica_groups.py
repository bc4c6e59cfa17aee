"""[fault_tolerance]: every combination that is not offered is refused by one rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_like.check import check_config, load_checked
from torchtitan_like.config import ConfigError, Problem, load_config
from torchtitan_like.config.sections_run import LIGHTHOUSE

GROUPS = "--training.steps 1000 --fault_tolerance.enable --fault_tolerance.group_size 2"
DILOCO = f"{GROUPS} --fault_tolerance.semi_sync_method diloco"
FRAGMENTS = "--fault_tolerance.module_fqns_per_model_fragment"


@pytest.fixture(autouse=True)
def _with_a_lighthouse(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo_root)
    monkeypatch.setenv(LIGHTHOUSE, "http://127.0.0.1:29510")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # also without torchft


def check(line: str, world_size: int = 2) -> list[Problem]:
    return check_config(load_config(line.split()), world_size, training=True)


def test_groups_need_a_lighthouse_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIGHTHOUSE)
    (problem,) = check(GROUPS)
    assert (
        problem.severity == "error" and "torchtitan_like.distributed.lighthouse" in problem.remedy
    )
    (warning,) = check_config(load_config(GROUPS.split()), 2, training=False)
    assert warning.severity == "warning"


def test_steps_without_a_semi_sync_method_have_no_effect() -> None:
    (problem,) = check(f"{GROUPS} --fault_tolerance.sync_steps 7")
    assert (problem.severity, problem.key) == ("warning", "fault_tolerance.sync_steps")


def test_groups_without_further_settings_have_no_problem() -> None:
    assert check(GROUPS) == check(f"{DILOCO} --fault_tolerance.sync_steps 6") == []
    fragments = "tok_embeddings,layers.0,layers.1,layers.2 layers.3,layers.4,layers.5,norm,output"
    arguments = f"{DILOCO} --fault_tolerance.sync_steps 4 {FRAGMENTS} {fragments}".split()
    assert check_config(load_config(arguments), 2, training=True) == []


def test_groups_share_the_global_batch() -> None:
    line = f"{GROUPS} --training.local_batch_size 2"
    assert check(f"{line} --training.global_batch_size 8") == []
    (problem,) = check(f"{line} --training.global_batch_size 12")
    assert problem.rule == "uneven-batch" and "2 x 4 = 8" in problem.expected


def test_each_group_has_a_run_folder() -> None:
    line = f"{GROUPS} --fault_tolerance.replica_id 1 --job.dump_folder outputs"
    assert load_config(line.split()).job.dump_folder == "outputs/replica_1"
    again = line.replace("outputs", "outputs/replica_1")  # the config that the group has stored
    assert load_config(again.split()).job.dump_folder == "outputs/replica_1"
    alone = line.replace("--fault_tolerance.enable", "--fault_tolerance.no_enable")
    assert load_config(alone.split()).job.dump_folder == "outputs"


def test_torchtitans_debug_file_is_accepted() -> None:
    line = "--job.config_file tests/assets/torchtitan/llama3_ft_debug_model.toml"
    problems = check(f"{line} --fault_tolerance.group_size 2 --model.name llama3_ft")
    assert [problem.rule for problem in problems if problem.severity == "error"] == []
    with pytest.raises(ConfigError, match="group_size"):
        load_checked(line.split(), 2, training=True)
