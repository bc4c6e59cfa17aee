"""The commands in README.md and the guides work as documented."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import comm_compute
from tests.harness.runner import ROOT
from torchtitan_like.check import load_checked
from torchtitan_like.checkpoint.step_folders import StepFolder
from torchtitan_like.cli import executable_commands, parse
from torchtitan_like.cli import main as titan
from torchtitan_like.config import ConfigError, JobConfig
from torchtitan_like.config.fields import find
from torchtitan_like.launcher.options import OPTIONS
from torchtitan_like.launcher.outcome import Start, how_to_resume, summary
from torchtitan_like.slurm.templates import TEMPLATES, notify
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.jsonl import read_rows

GUIDES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("guides", "recipes", "reference", "tutorials")
    for path in (ROOT / "docs" / folder).glob("*.md")
)
GUIDES = ["README.md", "CONTRIBUTING.md", *GUIDES]
DEFAULT = "train_configs/debug_model.toml"  # of ./run_train.sh
RUN_TRAIN = shlex.quote(str(ROOT / "run_train.sh"))
# Sizes that reduce the default command to a run of seconds.
TINY = (
    "--model.args.dim 32 --model.args.n_layers 2 --model.args.n_heads 4 --training.seq_len 32 "
    "--training.steps 4 --lr_scheduler.total_steps 8 --lr_scheduler.warmup_steps 2 "
    "--validation.seq_len 32"
)


def shell(command: str, folder: Path, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    """Run a command in a user's environment on CPU, without the variables of the tests."""
    dropped = ("PYTHONPATH", "NGPU", "NNODES", "CONFIG_FILE", "LOG_RANK", "LOG_PREFIX")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env |= {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    bash = ["bash", "-c", command]
    return subprocess.run(
        bash,
        env=env,
        cwd=folder,
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout,
    )


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a guide in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def documented_commands() -> list[str]:
    """Return every shell command of the guides, with continued lines joined and without comments.

    Other tests run the commands of the tutorials and of cli.md.
    """
    guides = [
        guide for guide in GUIDES if "tutorials/" not in guide and not guide.endswith("/cli.md")
    ]
    text = "".join(
        block for guide in guides for block in blocks((ROOT / guide).read_text(), "bash")
    )
    commands = (
        shlex.join(shlex.split(line, comments=True))
        for line in text.replace("\\\n", " ").splitlines()
    )
    return [command for command in commands if command]


# ---- the two commands of the first page, and the last output lines of the first one


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Run `./run_train.sh` outside the repository; return the folder and the finished process."""
    folder = tmp_path_factory.mktemp("elsewhere")
    return folder, shell(f"{RUN_TRAIN} {TINY} --job.dump_folder {folder}/outputs", folder)


def last_lines(process: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines after the log: three lines of facts and commands, then the results."""
    lines = process.stdout.splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("Logs: ")) :]


def test_run_train_trains_on_two_ranks_and_ends_with_a_page_and_a_text(trained) -> None:
    folder, process = trained
    assert process.returncode == 0, process.stderr[-3000:]
    assert (
        "--nproc_per_node=2" in process.stdout
        and "[rank0]:" in process.stdout
        and "[rank1]:" not in process.stdout
    )
    files, resume, sample, page, title, *text = last_lines(process)
    for path in ("attempts", "metrics.jsonl", "checkpoint/step-4", "tb"):
        assert f"{folder}/outputs/{path}" in files
        assert (folder / "outputs" / path).exists()
    assert resume.startswith("Resume (the same command, more steps): ") and sample.startswith(
        "Sample: "
    )
    assert page == f"Page: {folder}/outputs/report.html"
    assert "Content-Security-Policy" in Path(page.removeprefix("Page: ")).read_text()
    assert title == "Text from step-4:"
    assert text[0].startswith("The") and len("\n".join(text)) > 60
    assert "written:" not in process.stderr and "generated:" not in process.stderr


@pytest.mark.nightly
def test_printed_resume_command_works(trained) -> None:
    folder, process = trained
    resume = last_lines(process)[1].partition("): ")[2]
    resumed = shell(resume, folder)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "resume from" in resumed.stdout and "Training starts at step 5" in resumed.stdout
    assert (folder / "outputs/checkpoint/step-8/manifest.json").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "start", ["torchrun --nproc_per_node=8 -m torchtitan_like.train", "NGPU=8"]
)
def test_documented_command_lines_of_torchtitan_train(start: str, tmp_path: Path) -> None:
    """On 2 ranks, with the debug model."""
    command = next(line for line in documented_commands() if line.startswith(start))
    words = shlex.split(command.replace("=8", "=2").replace("llama3_8b", "debug_model"))
    end = next(number for number, word in enumerate(words) if "debug_model" in word) + 1
    run = "./run_train.sh" if start == "NGPU=8" else ""
    line = " ".join([*words[:end], run])
    programs = shlex.quote(str(Path(sys.executable).parent))
    settings = f"{TINY} --training.steps 1 --validation.enable false --job.dump_folder {tmp_path}"
    settings += " --job.show_results false"
    process = shell(f"export PATH={programs}:$PATH; {line} {settings}", ROOT)
    assert process.returncode == 0, process.stderr[-3000:]
    assert (tmp_path / "checkpoint/step-1/manifest.json").exists()


@pytest.mark.nightly
def test_printed_sample_command_works(trained) -> None:
    folder, process = trained
    sample = last_lines(process)[2].removeprefix("Sample: ")
    printed = shell(f"{sample} --num-tokens 4", folder)
    assert printed.returncode == 0, printed.stderr[-3000:]
    assert printed.stdout.startswith("The") and len(printed.stdout.strip()) > len("The")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    ["debugmodel_moe", "qwen3_moe_debug", "deepseek_v3_debug", "gpt_oss_debug", "llama4_debug"],
)
def test_debug_files_with_experts_train(name: str, tmp_path: Path) -> None:
    """On the shipped text, with the file's own batches."""
    file = shlex.quote(str(ROOT / f"train_configs/{name}.toml"))
    flags = f"--training.steps 6 --checkpoint.enable false --job.dump_folder {tmp_path}/outputs"
    process = shell(f"CONFIG_FILE={file} {RUN_TRAIN} {flags}", tmp_path, timeout=900)
    assert process.returncode == 0, process.stderr[-3000:]
    rows = read_rows(tmp_path / "outputs/metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] - 0.05, losses


def sample(step_folder: Path, capsys: pytest.CaptureFixture[str], **settings: object) -> str:
    arguments = [
        part
        for name, value in settings.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    assert (
        titan(
            ["generate", str(step_folder), "--prompt", "JULIET:", "--num-tokens", "8", *arguments]
        )
        == 0
    )
    return capsys.readouterr().out


def test_generated_sample_depends_only_on_its_seed(trained, capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    step_folder = trained[0] / "outputs/checkpoint/step-4"
    first = sample(step_folder, capsys, seed=1)
    assert first.startswith("JULIET:") and len(first.strip()) > len("JULIET:")
    assert sample(step_folder, capsys, seed=1) == first
    assert sample(step_folder, capsys, seed=2) != first
    greedy = [sample(step_folder, capsys, seed=seed, temperature=0) for seed in (1, 2)]
    assert greedy[0] == greedy[1] != first


def test_generate_takes_the_newest_step_of_a_checkpoint_folder(trained, capsys) -> None:
    assert titan(["generate", str(trained[0] / "outputs/checkpoint"), "--num-tokens", "1"]) == 0
    assert ", the newest step" in capsys.readouterr().err
    assert titan(["generate", str(trained[0] / "nowhere")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "nowhere is not a checkpoint" in captured.err


def test_config_with_several_problems_starts_no_rank(tmp_path: Path) -> None:
    """All problems are listed within five seconds of CPU time."""
    (tmp_path / "broken.toml").write_text(
        "[training]\nstesp = 10\nglobal_batch_size = 7\n"
        '[model]\nflavor = "9B"\nhf_assets_path = "./nowhere"\n'
        '[checkpoint]\ninterval = "often"\n[parallelism]\nenable_async_tensor_parallel = true\n'
    )
    before = os.times()
    process = shell(f"CONFIG_FILE=broken.toml {RUN_TRAIN} --optimizer.lr=fast", tmp_path)
    after = os.times()
    assert process.returncode == ExitCode.BAD_CONFIG
    for key in (
        "training.stesp",
        "training.global_batch_size",
        "model.flavor",
        "model.hf_assets_path",
        "checkpoint.interval",
        "parallelism.enable_async_tensor_parallel",
        "optimizer.lr",
    ):
        assert key in process.stderr, process.stderr
    assert (
        after.children_user + after.children_system - before.children_user - before.children_system
        < 5
    )
    assert "torchtitan_like.torchrun" not in process.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["broken.toml"]


FULL, WEIGHTS = {"kind": "full"}, {"kind": "weights"}


@pytest.mark.parametrize(
    ("saved", "last_step", "expected"),
    [
        ({}, 100, "Resume: needs a checkpoint: --checkpoint.enable"),
        (
            {50: FULL, 100: FULL},
            100,
            "Resume (the same command, more steps): ./run --training.steps 200",
        ),
        (
            {50: FULL, 100: WEIGHTS},
            100,
            "from step 50, because the last checkpoint has only the weights): ./run --training.st",
        ),
        (
            {100: WEIGHTS},
            100,
            "not possible from weights only; "
            "a new run can start from them: --checkpoint.initial_load_path",
        ),
        (
            {50: FULL, 80: FULL},
            80,
            "Resume (all data is read; allow more epochs: max_epochs of the source): ./run",
        ),
    ],
)
def test_resume_line_describes_the_resume(saved: dict, last_step: int, expected: str) -> None:
    steps = [StepFolder(step, Path(f"step-{step}"), manifest) for step, manifest in saved.items()]
    assert expected in how_to_resume(steps, "./run", planned=100, last_step=last_step)


def test_paths_with_spaces_are_quoted_in_printed_commands() -> None:
    only = [StepFolder(100, Path("my run/step-100"), WEIGHTS)]
    assert "path 'my run/step-100' and" in how_to_resume(only, "./run", planned=100, last_step=100)
    metrics = {"enable_tensorboard": True, "save_tb_folder": "tb"}
    config = JobConfig.model_validate(
        {
            "metrics": metrics,
            "checkpoint": {"enable": False, "folder": "c"},
            "training": {"steps": 1},
        }
    )
    start = Start(since=0.0, num_nodes=1, command="./run", titan=["titan"])
    assert "--logdir 'my run/tb'" in summary(config, Path("my run"), start, 1)[0]


# ---- the guides


def test_every_documented_command_has_a_test() -> None:
    scripts = ("count_collectives",)
    commands_in_other_tests = tuple(f"python scripts/{name}.py " for name in scripts)
    tested_prefixes = (
        "./run_train.sh",
        "./run_tests.sh",
        "env '|' grep ",
        "pip install ",
        "rsync -a outputs/checkpoint/",  # tests/unit/cli/test_archive.py
        "python -m benchmarks.fit_runs ",  # tests/unit/scripts/test_fit_runs.py
        *(f"torchrun --nproc_per_node={n} -m benchmarks.calibrate " for n in (2, 8)),
        *commands_in_other_tests,
        *CHECKS,
    )
    assert [
        command for command in documented_commands() if not command.startswith(tested_prefixes)
    ] == []


CHECKS = {
    "sbatch ": lambda words: check_job(words),
    "salloc ": lambda words: check_job(words),
    "slurm/": lambda words: check_job(words),
    "titan slurm ": lambda words: parse_titan(words[1:]),
    "scripts/fio_scan.sh ": lambda words: check_job(words),
    "torchrun --nproc_per_node=8 --no-python titan ": lambda words: parse_titan(words[4:]),
    "titan node ": lambda words: parse_titan(words[1:]),
    "python -m torchtitan_like.distributed.lighthouse ": lambda words: check_program(words[1:]),
    "python -m torchtitan_like.plan.coordinates ": lambda words: check(words[3:]),
    "python scripts/ckpt_interval.py ": lambda words: check_program(words[1:]),
    "TORCHFT_LIGHTHOUSE=": lambda words: check(
        [DEFAULT, "--world-size", words[1].partition("=")[2], *words[3:]]
    ),
    "titan run ": lambda words: parse_titan(words[1:]),
    "titan ckpt ": lambda words: parse_titan(words[1:]),
    "python slurm/notify.py ": lambda words: notify.senders_of(
        notify.parse(words[2:]), {"NOTIFY_WEBHOOK": "https://x"}
    ),
    "python scripts/make_corpus.py ": lambda words: check_program([*words[1:], "--check"]),
    "python scripts/comm_compute.py ": lambda words: comm_compute.main(words[2:]),
    "NCCL_DEBUG_TO=": lambda words: check(words[3:]),
    "python -m torchtitan_like.torchrun ": lambda words: check(["--world-size", "2", *words[6:]]),
    "NNODES=2 MASTER_ADDR=": lambda words: check(
        [words[4].partition("=")[2], "--world-size", "16", *words[6:]]
    ),
    "NNODES=2:4 MAX_RESTARTS=": lambda words: check(
        [words[5].partition("=")[2], "--world-size", "24", *words[7:]]
    ),
    "titan data ": lambda words: parse_titan(words[1:]),
    "titan eval ": lambda words: parse_titan(words[1:]),
    "titan generate ": lambda words: parse_titan(words[1:]),
    "PYTHONPATH=. titan generate ": lambda words: parse_titan(words[2:]),
    "titan plan ": lambda words: parse_titan(words[1:]),
    "PYTORCH_ALLOC_CONF= titan plan ": lambda words: parse_titan(words[2:]),
    "titan download ": lambda words: parse_titan(words[1:]),
    # test_plan_search.py writes a best.toml and checks it.
    "titan check ": lambda words: (
        parse_titan(words[1:]) if "best.toml" in words else check_titan(words[2:])
    ),
    "titan train ": lambda words: check_train(words),
    "titan bench ": lambda words: parse_titan(words[1:]),
    "titan ladder ": lambda words: parse_titan(words[1:]),
    "NGPU=": lambda words: check(
        [words[1].partition("=")[2], "--world-size", words[0].partition("=")[2], *words[3:]]
    ),
    "torchrun --nproc_per_node=2 benchmarks/": lambda words: check(
        ["--world-size", "2", *words[3:]]
    ),
    "python -m tests.gpu_null.harness 2 ": lambda words: check(["--world-size", "2", *words[4:]]),
    "NULL_GPU_PYTHON=": lambda words: check_shell("run_tests.sh", "--null-gpu"),
    "benchmarks/gpu.sh": lambda words: check_shell("benchmarks/gpu.sh", "tests"),
    # tests/distributed/test_larger_world.py runs the program of this guide.
    "torchrun --nproc_per_node=4 post_training.py": lambda words: None,
    "torchrun --nproc_per_node=8 -m torchtitan_like.train ": lambda words: check(
        ["--world-size", "8", *words[4:]]
    ),
}


def parse_titan(words: list[str]) -> None:
    """Check that the command accepts its arguments."""
    commands = {command.name: command for command in executable_commands()}
    num_words = 2 if " ".join(words[:2]) in commands else 1
    parse(commands[" ".join(words[:num_words])], words[num_words:])


def check_program(words: list[str]) -> None:
    """Check that the help of a script or of a module (-m) has all options of the command."""
    program = words[:2] if words[0] == "-m" else words[:1]
    process = shell(shlex.join([sys.executable, *program, "--help"]), ROOT)
    assert process.returncode == 0, process.stderr
    options = [word for word in words if word.startswith("--")]
    assert options and all(option in process.stdout for option in options), process.stdout


def check(arguments: list[str]) -> None:
    """Check that the configuration accepts the settings and that each has an effect."""
    process = shell(
        shlex.join([sys.executable, "-m", "torchtitan_like", "check", *arguments]), ROOT
    )
    assert process.returncode == 0, process.stderr
    assert "no effect" not in process.stderr, process.stderr


def check_train(words: list[str]) -> None:
    """Check the settings.

    test_hf_family.py runs the command that needs a folder of the Hub, and test_extensions_guide.py
    trains with the run.toml of its guide.
    """
    if "hf" in words or "run.toml" in words:
        parse_titan(words[1:])
    else:
        check_titan(["--world-size" if word == "--nproc" else word for word in words[2:]])


def check_titan(arguments: list[str]) -> None:
    """Check that `titan check` accepts the config and settings and that each has an effect.

    The files that --training needs are not here.
    """
    arguments = [word for word in arguments if word != "--training"]
    process = shell(
        shlex.join([sys.executable, "-m", "torchtitan_like", "check", *arguments]), ROOT
    )
    assert process.returncode == 0, process.stderr
    assert "no effect" not in process.stderr, process.stderr


def check_shell(script: str, word: str) -> None:
    """Check that the script parses and contains the word. A run needs a CUDA build of torch."""
    assert shell(f"bash -n {script}", ROOT).returncode == 0 and word in (ROOT / script).read_text()


def check_job(words: list[str]) -> None:
    """Check the `--help` of the scripts, and the settings of a run. tests/slurm runs the jobs."""
    scripts = [word for word in words if word.startswith(("scripts/", "slurm/"))]
    for script in scripts:
        python = [sys.executable] if script.endswith(".py") else []
        path = str(TEMPLATES / Path(script).name) if script.startswith("slurm/") else script
        process = shell(shlex.join(["env", f"SCRIPTS={TEMPLATES}", *python, path, "--help"]), ROOT)
        assert process.returncode == 0 and len(process.stdout) > 100, process.stderr
    settings = words[words.index(scripts[-1]) + 1 :]
    if settings[:1] == ["--job.config_file"]:
        check(["--world-size", "64", *settings])


@pytest.mark.parametrize("start", CHECKS)
def test_documented_commands_work(start: str) -> None:
    commands = [command for command in documented_commands() if command.startswith(start)]
    assert commands
    for command in commands:
        CHECKS[start](shlex.split(command))


def test_check_works_by_its_old_name() -> None:
    check(
        [
            "train_configs/llama3_8b.toml",
            "--world-size",
            "8",
            "--activation_checkpoint.mode",
            "full",
        ]
    )


# Text of a documented command -> text that fits the run of `trained`.
IN_TRAINED = {
    "titan plan llama3_8b.toml": "titan plan debug_model.toml",  # takes less time
    "/shared/run1": "outputs",
    "/shared": ".",
    "mine/": "outputs/",
    "other-run": "outputs",
    "outputs_a": "outputs",
    "outputs_b": "outputs",
    "step-200": "step-4",
    "step-1000": "step-4",
    "step-100": "step-4",
    "checkpoint/step-N.nonfinite": "outputs/checkpoint/step-4",
    "--step 1203": "--step 3",
}
# Commands that need no large model, GPU or network. test_replay.py runs `titan run replay`.
RUNNABLE = (
    *("titan ckpt ", "titan generate ", "titan data show ", "titan plan ", "titan slurm init "),
    "titan run report outputs -o loss.svg",
    "titan run report outputs_a ",
    *("titan run ls ", "titan run watch ", "titan run compare ", "titan node check --gpus 0"),
)


# Word of a command -> the file of the test that executes such a command.
EXECUTED_ELSEWHERE = {
    "--every": "test_page.py",
    "my_extensions.py": "test_extensions_guide.py",
    "--ema": "test_ema.py",
    "search": "test_plan_search.py",
    "outputs/llama3_8b": "test_plan_compare.py",
    "my_cluster.toml": "test_fit_runs.py",
    "cpu.toml": "test_calibrate.py",
    "/archive/run-7/step-500": "test_archive.py",
}


@pytest.mark.nightly
def test_documented_commands_run_on_a_run(trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained[0])
    Path("prompts.jsonl").write_text('{"prompt": "To be"}\n{"prompt": "The"}\n')
    commands = [
        command
        for command in documented_commands()
        if command.startswith(RUNNABLE) and EXECUTED_ELSEWHERE.keys().isdisjoint(command.split())
    ]
    assert len(commands) > len(RUNNABLE)
    for command in commands:
        for text, replacement in IN_TRAINED.items():
            command = command.replace(text, replacement)
        assert titan(shlex.split(command)[1:]) == 0, command


@pytest.mark.parametrize("guide", GUIDES)
def test_keys_and_paths_in_the_guides_exist(guide: str) -> None:
    text = (ROOT / guide).read_text()
    keys = set(re.findall(r"--(?!section\.)([a-z_]+(?:\.[a-z_]+)+)", text))
    keys -= {"my_section.momentum"}  # a section of user code in the guide to extensions
    assert [key for key in keys if find(tuple(key.split("."))) is None] == []
    # Files of the repository. Paths of run files and user files start with other folders.
    pattern = (
        r"(?:(?<=\.\./)|(?<![\w./]))(?:scripts|train_configs|tests|docs|torchtitan_like)/[\w./-]*\w"
    )
    paths = set(re.findall(pattern, text))
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_documented_exit_codes_are_complete() -> None:
    text = (ROOT / "docs/reference/exit_codes.md").read_text()
    table = {int(code) for code in re.findall(r"^\| (\d+) \| ", text, re.MULTILINE)}
    assert table == {1, *map(int, ExitCode)}  # 1: a crash


def test_documented_variables_exist() -> None:
    text = (ROOT / "docs/reference/environment.md").read_text()
    rows = re.findall(r"^\| (`[A-Z][^|]*) \|", text, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"[A-Z_]+", row)}
    assert {"NGPU", "CONFIG_FILE", "LOG_RANK", "LOG_PREFIX", "NNODES", "MASTER_ADDR"} <= names
    assert names <= {"CONFIG_FILE", *(option.variable for option in OPTIONS)}


UNAVAILABLE = (
    "model.converters=quantize.linear.mx",
    "experimental.custom_args_module=my.module",
)


@pytest.mark.parametrize("feature", UNAVAILABLE)
def test_unavailable_features_are_rejected(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = [
        "--job.config_file",
        "train_configs/debug_model.toml",
        "--data.sources.a.path=README.md",
    ]
    with pytest.raises(ConfigError) as caught:
        load_checked(
            [*arguments, f"--{feature}", "--checkpoint.last_save_model_only=true"], 2, training=True
        )
    assert any("not available yet" in str(problem) for problem in caught.value.problems), (
        caught.value
    )


def test_documented_example_of_a_rank_test_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example is imported as a module, because its ranks import it too."""
    (example,) = blocks((ROOT / "CONTRIBUTING.md").read_text(), "python")
    (tmp_path / "test_example_of_ranks.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("test_example_of_ranks")
    module.test_all_ranks_take_part()
    assert module.run_ranks(module.summed_ranks, 2) == [1.0] * 2


def test_documented_example_of_reading_metrics_works(
    trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained[0])
    (example,) = blocks((ROOT / "docs/reference/metrics.md").read_text(), "python")
    names: dict[str, list[float]] = {}
    exec(example, names)
    assert len(names["losses"]) >= 4
