"""The commands of the guide start from a folder of the Hub, resume, and export without its config.json."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runner import ROOT
from torchtitan_like.cli import main as titan
from torchtitan_like.config.layers import parse_toml

SMALL = "--nproc 1 --training.seq_len 32 --validation.seq_len 32 --validation.steps 1"


def documented_commands() -> list[list[str]]:
    """Return the arguments of `titan` in the guide's section."""
    guide = (ROOT / "docs/guides/models.md").read_text()
    (block,) = re.findall(
        r"### Dense checkpoints of the Hub\n\n```bash\n(.*?)```", guide, re.DOTALL
    )
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_documented_commands_train_resume_and_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make, train = documented_commands()
    assert titan(make) == 0
    outputs = []
    for steps in ("4", "5"):
        settings = [*shlex.split(SMALL), "--training.steps", steps]
        process = subprocess.run(
            [sys.executable, "-m", "torchtitan_like", *train, *settings],
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert process.returncode == 0, process.stderr[-3000:]
        outputs.append(process.stdout)
    assert "Model hf llama size: 368,960 total parameters" in outputs[0]
    assert "loading model.hf_assets_path" in outputs[0] and "Read 21 tensors" in outputs[0]
    assert "resume from" in outputs[1]

    step = tmp_path / "outputs/hf/checkpoint/step-5"
    stored = parse_toml((step / "config.toml").read_text())["model"]
    assert (stored["flavor"], stored["args"]["rope_type"]) == ("llama", "llama3")
    (tmp_path / "tiny/llama/config.json").unlink()
    assert titan(["generate", str(step), "--num-tokens", "2"]) == 0
    assert titan(["ckpt", "export", str(step), "exported"]) == 0
    transformers = pytest.importorskip("transformers")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", output_loading_info=True
    )
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not any(report.values()), report
