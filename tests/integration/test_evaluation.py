"""`titan eval` gives the numbers of lm-eval's backend `hf` on an export of the same weights.

lm-eval runs as released: `pip install -e .[interop]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.steps import MODEL, make_step
from torchtitan_like.cli import main as titan
from torchtitan_like.config.datasets import DATASETS
from torchtitan_like.distributed.world import LaunchedAs
from torchtitan_like.inference import evaluation
from torchtitan_like.inference.loading import inference_world, load_checkpoint
from torchtitan_like.inference.scoring import Scorer
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
    """The results of the harness with its own model class, in batches of one text."""
    return run_harness(folder, "hf", {"pretrained": str(folder / "exported"), "dtype": "float32"})


def run_harness(folder: Path, model: Any, model_args: Any = None) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=list(TASKS),
        device="cpu",
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        bootstrap_iters=0,
    )
    return results


@pytest.fixture(params=["run/checkpoint/step-7", "exported"])
def scorer(request: pytest.FixtureRequest, folder: Path) -> Iterator[Scorer]:
    with inference_world(LaunchedAs(0, 0, 1)) as world:
        yield Scorer(load_checkpoint(folder / request.param, world), batch_size=4)


def test_every_answer_equals_that_of_the_hf_backend(
    folder: Path, theirs: dict[str, Any], scorer: Scorer
) -> None:
    ours = run_harness(folder, evaluation.harness_model(scorer))
    num_compared = 0
    for task in TASKS:
        for own, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert own["doc"] == other["doc"]
            for answer, expected in zip(own["resps"], other["resps"], strict=True):
                compare_answers(answer[0], expected[0])
                num_compared += 1
    assert num_compared == 12 * (3 + 1 + 1)
    for task in TASKS:
        metrics = {k: v for k, v in theirs["results"][task].items() if isinstance(v, float)}
        assert metrics and metrics == {
            k: pytest.approx(v, rel=1e-6) for k, v in ours["results"][task].items() if k in metrics
        }


def compare_answers(answer: Any, expected: Any) -> None:
    """Compare texts, log-likelihoods, or (log-likelihood, is greedy)."""
    if isinstance(expected, tuple | list):
        assert answer[1] == expected[1]
        answer, expected = answer[0], expected[0]
    # Sums of up to 200 terms of size 10, rounded to float32 by the harness.
    assert answer == (expected if isinstance(expected, str) else pytest.approx(expected, rel=1e-6))


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
    from torchtitan_like.cli.eval import EXAMPLE

    run = folder / "outputs"
    if not run.exists():
        run.symlink_to("run")
        (run / "checkpoint/step-100").symlink_to("step-7")
    monkeypatch.chdir(folder)
    assert titan(EXAMPLE.split()[1:]) == 0


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
