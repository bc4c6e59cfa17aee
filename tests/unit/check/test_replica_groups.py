"""[fault_tolerance]: every combination that is not offered is refused by one rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_like.check import check_config, load_checked
from torchtitan_like.check.rules.replica_groups import FAULT_TOLERANCE_RULES
from torchtitan_like.config import ConfigError, Problem, load_config
from torchtitan_like.config.sections_run import LIGHTHOUSE
from torchtitan_like.util.modules import pip_install

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


# Rule -> settings in addition to `GROUPS`, and the number of ranks.
MOE = "--model.name qwen3 --model.flavor debugmodel_moe"
REFUSED = {
    "groups-pp": ("--parallelism.pipeline_parallel_degree 2", 2),
    "groups-cp": ("--parallelism.context_parallel_degree 2", 2),
    "groups-tp": ("--parallelism.tensor_parallel_degree 2", 2),
    "groups-replicate": ("--parallelism.data_parallel_replicate_degree 2", 2),
    "groups-experts": (MOE, 2),
    "groups-early-step": ("--optimizer.early_step_in_backward", 2),
    "groups-high-norm": ("--resilience.on_high_norm rerun", 2),
    "groups-average": (
        "--checkpoint.enable --ema.enable --fault_tolerance.semi_sync_method local_sgd", 2),
    "groups-offload": ("--training.enable_cpu_offload", 2),
    "groups-stream": ("--training.dataset c4", 2),
    "groups-ramp": ("--training.global_batch_size 64 --training.batch_ramp 32,32,100", 2),
    "groups-seed-checkpoint": ("--checkpoint.enable --checkpoint.create_seed_checkpoint", 1),
    "groups-quantize": (
        "--fault_tolerance.semi_sync_method diloco --fault_tolerance.should_quantize", 2),
    "more-live-groups-than-groups": ("--fault_tolerance.min_replica_size 3", 2),
    "uneven-fragments": (
        "--fault_tolerance.semi_sync_method diloco --fault_tolerance.num_fragments 2", 2),
    "late-fragment": (
        "--fault_tolerance.semi_sync_method diloco --fault_tolerance.fragment_sync_delay 5", 2),
    "wrong-fragments": (
        f"--fault_tolerance.semi_sync_method diloco {FRAGMENTS} tok_embeddings,layers.0", 2),
}  # fmt: skip

TESTED_WITH_GROUPS = {
    *REFUSED,
    "groups-without-size",
    "groups-without-lighthouse",
    "groups-over-nccl",
    "positions-of-groups",
    "torchft-not-installed",
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_rule_refuses_each_combination(name: str) -> None:
    settings, world_size = REFUSED[name]
    line = f"{GROUPS} {settings}"
    (problem,) = [
        problem
        for problem in check(line, world_size)
        if problem.severity == "error" and problem.rule in {r.name for r in FAULT_TOLERANCE_RULES}
    ]
    assert problem.rule == name
    assert problem.expected and problem.remedy
    # Without groups, the same settings are not refused for this reason.
    alone = line.replace("--fault_tolerance.enable", "--fault_tolerance.no_enable")
    assert name not in {problem.rule for problem in check(alone, world_size)}


def test_groups_need_a_number_of_groups() -> None:
    (problem,) = check(GROUPS.replace("group_size 2", "group_size 0"))
    assert problem.rule == "groups-without-size" and problem.key == "fault_tolerance.group_size"


def test_groups_need_a_lighthouse_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIGHTHOUSE)
    (problem,) = check(GROUPS)
    assert problem.severity == "error" and "titan lighthouse" in problem.remedy
    (warning,) = check_config(load_config(GROUPS.split()), 2, training=False)
    assert warning.severity == "warning"


def test_groups_need_torchft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "torchft" else name
    )
    (problem,) = check(GROUPS)
    assert problem.remedy == pip_install("torchft>=0.2,<0.3")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (f"{GROUPS} --fault_tolerance.process_group nccl", "fault_tolerance.process_group"),
        (f"{GROUPS} --checkpoint.enable --checkpoint.no_enable_ft_dataloader_checkpoints",
         "checkpoint.enable_ft_dataloader_checkpoints"),
        (f"{GROUPS} --fault_tolerance.sync_steps 7", "fault_tolerance.sync_steps"),
    ],
)  # fmt: skip
def test_settings_cause_warnings(line: str, key: str) -> None:
    (problem,) = check(line)
    assert (problem.severity, problem.key) == ("warning", key)


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
