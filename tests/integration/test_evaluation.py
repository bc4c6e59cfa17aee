"""`titan eval` of a step gives the numbers of lm-eval's backend `hf` on its export.

lm-eval runs as released: `pip install -e .[interop]`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.examples import example_words
from tests.unit.checkpoint.steps import MODEL, make_step
from torchtitan_like.cli import main as titan
from torchtitan_like.config.dataset_names import DATASETS
from torchtitan_like.util.jsonl import read_rows

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
INSTALL = "the package {} is missing: pip install -e .[interop]"
CHOICES = """
task: next_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{[a, b, c]}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROLLING = """
task: perplexity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""
GENERATION = """
task: continue
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{a}}}}"
generation_kwargs: {{until: ["e"], max_gen_toks: 12}}
metric_list: [{{metric: exact_match}}]
"""
TASKS = {"next_word": CHOICES, "perplexity": ROLLING, "continue": GENERATION}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with step-7, its export, and the tasks: questions of text with three endings each."""
    for package in ("lm_eval", "accelerate"):
        pytest.importorskip(package, reason=INSTALL.format(package))
    folder = tmp_path_factory.mktemp("eval")
    (folder / "run/attempts").mkdir(parents=True)
    (folder / "run/checkpoint").mkdir()
    # The texts are longer than this context.
    step = make_step(folder / "run/checkpoint/step-7", MODEL | {"max_seq_len": 64})
    assert titan(["ckpt", "export", str(step), str(folder / "exported")]) == 0
    with DATASETS["shakespeare_validation"].file.open(encoding="utf-8") as lines:
        words = json.loads(next(lines))["text"].split()
    rows = []
    for i in range(12):
        length = (3, 17, 60, 120)[i % 4]  # words; a context may end with a blank
        part = words[i * 15 :]
        rows.append(
            {
                "context": " ".join(part[:length]) + " " * (i % 2),
                "a": " ".join(["", *part[length : length + 1 + i % 3]]),
                "b": " nothing",
                "c": " the",
                "text": " ".join(part[:length]),
            }
        )
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks").mkdir()
    for name, template in TASKS.items():
        (folder / f"tasks/{name}.yaml").write_text(template.format(data=data))
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, Any]:
    """The results of the harness on the export of `titan ckpt export`, in batches of one text."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    results: dict[str, Any] = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder / "exported"), "dtype": "float32"},
        tasks=list(TASKS),
        device="cpu",
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        bootstrap_iters=0,
    )
    return results


def test_command_writes_the_metrics_of_the_hf_backend(
    folder: Path, theirs: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    step = folder / "run/checkpoint/step-7"
    words = ["--tasks", ",".join(TASKS), "--include-path", str(folder / "tasks")]
    assert titan(["eval", str(step), *words, "--batch-size", "4"]) == 0
    printed = capsys.readouterr().out
    assert f"Written to {folder / 'run/eval.jsonl'}" in printed
    rows = read_rows(folder / "run/eval.jsonl")
    assert {(row["step"], row["num_samples"]) for row in rows} == {(7, 12)}
    values = {(row["task"], f"{row['metric']},{row['filter']}"): row["value"] for row in rows}
    for task in TASKS:
        for name, value in theirs["results"][task].items():
            if isinstance(value, float) and "," in name and "_stderr" not in name:
                assert values.pop((task, name)) == pytest.approx(value, rel=1e-6)
    assert values == {}
    words = ["--tasks", "next_word", "--include-path", str(folder / "tasks"), "--limit", "2"]
    output = folder / "other.jsonl"
    assert titan(["eval", str(folder / "exported"), *words, "-o", str(output), "--json"]) == 0
    assert [row["num_samples"] for row in read_rows(output)] == [2, 2]


def test_example_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = folder / "outputs"
    if not run.exists():
        run.symlink_to("run")
        (run / "checkpoint/step-100").symlink_to("step-7")
    monkeypatch.chdir(folder)
    assert titan(example_words("eval")) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tasks", "nowhere_at_all"), "there is no task nowhere_at_all. Expected names"),
        (("--tasks", "next_word", "--include-path", "nowhere"), "nowhere is not a folder"),
    ],
)
def test_wrong_tasks_are_rejected(
    folder: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert titan(["eval", str(folder / "run/checkpoint/step-7"), *words]) == 2
    assert message in capsys.readouterr().err


def test_random_weights_make_answers_differ(theirs: dict[str, Any]) -> None:
    """Otherwise equal answers would show nothing."""
    scores = torch.tensor(
        [answer[0][0] for sample in theirs["samples"]["next_word"] for answer in sample["resps"]]
    )
    assert scores.std() > 1 and scores.unique().numel() > 30
