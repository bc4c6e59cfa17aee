"""A stand-in for lm_eval in tests: its task "words" is the mean loss of one text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

TEXT = "To be, or not to be, that is the question"
MODULE = f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

calls = []

def simple_evaluate(*, model, model_args, **options):
    assert model == "hf"
    calls.append({{**model_args, **options}})
    folder = model_args["pretrained"]
    tokenizer = AutoTokenizer.from_pretrained(model_args.get("tokenizer", folder))
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=model_args["dtype"])
    ids = torch.tensor([tokenizer.encode({TEXT!r}, add_special_tokens=False)])
    with torch.no_grad():
        loss = network(ids, labels=ids).loss.item()
    return {{"results": {{"words": {{"alias": "words", "loss,none": loss}}}}}}
"""
TASKS = """
class TaskManager:
    def __init__(self, include_path):
        self.include_path = include_path

    def match_tasks(self, names):
        return [name for name in names if name == "words"]
"""


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """Make `import lm_eval` import the stand-in until the test ends. Return the module."""
    from torchtitan_like.inference import evaluation

    for path, text in {
        "lm_eval/__init__.py": MODULE,
        "lm_eval/tasks.py": TASKS,
        "lm_eval-0.4.9.dist-info/METADATA": "Name: lm_eval\nVersion: 0.4.9\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(evaluation, "PACKAGES", ("lm_eval", "transformers"))
    import lm_eval

    # The next test imports its own stand-in, or the package.
    monkeypatch.setitem(sys.modules, "lm_eval", lm_eval)
    return lm_eval
