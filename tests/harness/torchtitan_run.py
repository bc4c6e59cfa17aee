"""Train a tiny Llama with the classes of TorchTitan 0.2, and save it as TorchTitan does.

    python -m tests.harness.torchtitan_run FOLDER

needs `pip install -e .[interop]`. It writes `FOLDER/step-3`, a full checkpoint, and
`FOLDER/expected.json`: loss and gradient norm of the following steps, and the logits of
the first of them. The trainer reads the same samples with `ARGUMENTS`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from tests.harness.runner import ROOT, run_trainer

SAVED = 3  # steps before the checkpoint
STEPS = 7
SIZES = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 16}
SEQ_LEN = 16
LR = 2e-3
# The last step of the warm-up, the stable phase, and the decay follow the checkpoint.
SCHEDULE = {"warmup_steps": 4, "total_steps": 7, "decay_ratio": 0.4, "min_lr_factor": 0.1}
ASSETS = ROOT / "tests/assets/checkpoints"
ARGUMENTS = [
    *("--job.config_file", str(ROOT / "train_configs/debug_model.toml")),
    *("--model.hf_assets_path", str(ASSETS / "tokenizer")),
    *(part for key, value in SIZES.items() for part in (f"--model.args.{key}", str(value))),
    *("--model.args.vocab_size", "32", "--model.args.max_seq_len", str(SEQ_LEN)),
    *("--training.dataset_path", str(ASSETS / "text.jsonl"), "--training.seq_len", str(SEQ_LEN)),
    *("--training.local_batch_size", "4", "--training.global_batch_size", "4"),
    *("--training.dtype", "float32", "--training.mixed_precision_param", "float32"),
    *("--training.steps", str(STEPS), "--optimizer.lr", str(LR)),
    *(part for k, value in SCHEDULE.items() for part in (f"--lr_scheduler.{k}", str(value))),
    *("--validation.enable", "false", "--metrics.log_freq", "1", "--debug.seed", "7"),
]


class Batches(torch.utils.data.IterableDataset[int]):
    """A dataset for TorchTitan's loader, whose state becomes a part of the checkpoint."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


def read_batches(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and labels (batch, seq) of every step of a run with `ARGUMENTS`."""
    printing = ["--experimental.custom_import", "tests.harness.print_batches"]
    output = ["--job.dump_folder", str(folder), "--checkpoint.enable", "false"]
    run = run_trainer([*ARGUMENTS, *printing, *output], 1, folder)
    assert run.returncode == 0, run.tail
    fed = [json.loads(line[4:]) for line in run.stdout.splitlines() if line.startswith("fed ")]
    steps = [step["samples"] for step in fed[:STEPS]]
    return [
        (torch.tensor([row[1] for row in rows]), torch.tensor([row[2] for row in rows]))
        for rows in steps
    ]


def build_model() -> nn.Module:
    """Return TorchTitan's Llama of these sizes, with random weights."""
    # The kernels of its experts need triton. This model has no experts.
    sys.modules["torchtitan.models.moe.kernels"] = mock.MagicMock()
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    sizes: dict[str, Any] = {**SIZES, "vocab_size": 32, "max_seq_len": SEQ_LEN}
    model: nn.Module = Transformer(TransformerModelArgs(**sizes, rope_theta=500000))
    with torch.no_grad():
        model.init_weights()  # type: ignore[operator]
        for name, weight in model.named_parameters():
            if ".attention.w" in name:
                weight.mul_(30)  # else the attention and the order of its rows have no effect
    return model


def run(folder: Path, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Train, save `folder/step-3`, and return what followed."""
    torch.manual_seed(1)
    model = build_model()
    from torchtitan.components.checkpoint import ModelWrapper
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.job_config import LRScheduler
    from torchtitan.distributed.utils import clip_grad_norm_

    optimizers = OptimizersContainer(
        [model],
        torch.optim.AdamW,
        {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    )
    schedule: dict[str, Any] = SCHEDULE
    schedulers = build_lr_schedulers(optimizers, LRScheduler(**schedule), STEPS)
    loader = ParallelAwareDataloader(Batches(), 0, 1, batch_size=1)
    expected: dict[str, Any] = {"loss": [], "grad_norm": []}
    for step, (tokens, labels) in enumerate(batches, start=1):
        optimizers.zero_grad()
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        norm = clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizers.step()
        schedulers.step()
        if step > SAVED:
            expected["loss"].append(loss.item())
            expected["grad_norm"].append(norm.item())
        if step == SAVED + 1:
            expected["logits"] = logits.detach().tolist()
        if step == SAVED:
            state = {
                "optimizer": optimizers,
                "lr_scheduler": schedulers,
                "dataloader": loader,
                "train_state": {"step": step, "ntokens_seen": step * tokens.numel()},
                **ModelWrapper(model).state_dict(),
            }
            dcp.save(state, checkpoint_id=folder / f"step-{step}", no_dist=True)
    return expected


@torch.no_grad()
def logits_of(step: Path, tokens: Tensor) -> Tensor:
    """Load a folder's weights as TorchTitan does. Returns its model's logits (batch, seq, vocab)."""
    model = build_model()
    from torchtitan.components.checkpoint import ModelWrapper

    wrapper = ModelWrapper(model)
    state = wrapper.state_dict()
    dcp.load(state, checkpoint_id=step, no_dist=True)
    wrapper.load_state_dict(state)
    logits: Tensor = model(tokens)
    return logits


class TrainState:
    """The progress that TorchTitan's trainer saves."""

    def __init__(self) -> None:
        self.step = 0
        self.num_tokens = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.num_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.num_tokens = state["ntokens_seen"]


def continue_run(step: Path, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Resume a full checkpoint with TorchTitan's checkpointer, and train on `batches` after it.

    batches: of all steps, from the first one. Returns step, tokens, loss and gradient norm.
    """
    model = build_model()
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.job_config import Checkpoint, LRScheduler
    from torchtitan.distributed.utils import clip_grad_norm_

    # Other settings than in the checkpoint: loading must replace them.
    optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": 1.0, "fused": True})
    schedule: dict[str, Any] = SCHEDULE
    schedulers = build_lr_schedulers(optimizers, LRScheduler(**schedule), STEPS)
    progress = TrainState()
    manager = CheckpointManager(
        dataloader=ParallelAwareDataloader(Batches(), 0, 1, batch_size=1),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": progress},
        checkpoint_config=Checkpoint(
            enable=True,
            folder="none",
            initial_load_path=str(step),
            initial_load_model_only=False,
            exclude_from_loading=["dataloader"],
            keep_latest_k=0,
        ),
        sd_adapter=None,
        base_folder=str(step.parent / "of-torchtitan"),
    )
    if not manager.load():
        raise RuntimeError(f"TorchTitan has loaded nothing from {step}. Expected a checkpoint")
    result: dict[str, Any] = {"step": progress.step, "tokens": progress.num_tokens}
    result |= {"loss": [], "grad_norm": [], "lr": []}
    for tokens, labels in batches[progress.step :]:
        optimizers.zero_grad()
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        norm = clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        result["lr"].append(optimizers.optimizers[0].param_groups[0]["lr"])
        optimizers.step()
        schedulers.step()
        result["loss"].append(loss.item())
        result["grad_norm"].append(norm.item())
    return result


def make(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        batches = read_batches(Path(work) / "outputs")
    expected = run(folder, batches)
    expected["tokens"] = batches[SAVED][0].tolist()
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
