"""Make a small model with random weights from a training config, for tests and experiments."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchtitan_like.build import identity_of
from torchtitan_like.check.model_checks import read_sizes
from torchtitan_like.checkpoint.errors import with_checkpoint_errors
from torchtitan_like.checkpoint.hf.folder import write_model
from torchtitan_like.checkpoint.step_folders import write_manifest
from torchtitan_like.checkpoint.tools.convert import convert
from torchtitan_like.checkpoint.tools.open_checkpoint import open_checkpoint
from torchtitan_like.config import ConfigError, dump_toml, load_config
from torchtitan_like.config.loader import CommandLine, import_module
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.distributed.data_parallel import DTYPES
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.spec import get_spec, resolve_args
from torchtitan_like.stored_config import check_model_name, custom_import_in
from torchtitan_like.util.bundle import find_config
from torchtitan_like.util.files import staged_path
from torchtitan_like.util.run_directory import step_name

# Sizes of a small model, by their names in the model families.
SIZES = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "head_dim": 16,
    "hidden_dim": 128,
    "multiple_of": 32,
}


def make_tiny_model(config_file: str, out: Path, settings: Sequence[str], dtype: str) -> str:
    """Write random weights of the config's model family, in `SIZES`, into the folder `out`.

    `out` is a folder for `transformers`. `out`/step-0 is the same model as a checkpoint, and
    `out`/make.sh has the command that makes it. settings: settings of the config, as for training.
    Returns the number of parameters and the lines of a config. Raises ConfigError, TokenizerError,
    CheckpointError, OSError, and ValueError for inconsistent sizes.
    """
    if problem := import_module(custom_import_in(settings)):
        raise ConfigError([problem])
    config = load_config(["--job.config_file", str(find_config(config_file)), *settings])
    check_model_name(config, custom_import_in(settings))
    config, _ = read_sizes(config)
    spec = get_spec(config.model.name)
    large = resolve_args(spec, config.model.flavor, config.model.args)
    vocab_size = load_tokenizer(config.model.tokenizer_folder).vocab_size
    sizes = {**SIZES, "vocab_size": vocab_size, "n_kv_heads": _num_kv_heads(large)}
    given = {setting.split("=")[0].removeprefix("--model.args.") for setting in settings}
    fields = {field.name for field in dataclasses.fields(large)} - given
    changes = {name: size for name, size in sizes.items() if name in fields and size is not None}
    args = resolve_args(spec, config.model.flavor, {**config.model.args, **changes})
    with torch.device("meta"):
        model = spec.build(args).to(DTYPES[dtype])
    materialize(model, torch.device("cpu"))
    initialize(model, spec.init_table(args), config.debug.seed or 0)
    group = with_checkpoint_errors(HostGroup.alone())
    identity = identity_of(spec, args, config.model)
    size_settings = [f"--model.args.{name}={json.dumps(size)}" for name, size in changes.items()]
    command = ["titan", "data", "tiny", "model", config_file, str(out), "--dtype", dtype]
    with staged_path(out) as staged:
        staged.mkdir()
        files = write_model(
            staged, model.state_dict(), identity, group, dtype=DTYPES[dtype], by_index=False
        )
        write_manifest(staged, {"kind": "hf", "step": 0, "files": files})
        convert(
            open_checkpoint(staged),
            staged / step_name(0),
            "native",
            dtype=None,
            identity=identity,
            config=dump_toml(CommandLine(size_settings, base=config).load()),
        )
        (staged / "make.sh").write_text(
            f"cd {shlex.quote(os.getcwd())} &&\n    {shlex.join([*command, *settings])}\n",
            encoding="utf-8",
        )
    lines = [f"{name} = {json.dumps(size)}" for name, size in changes.items()]
    head = f"{out}: {spec.name} with {spec.num_params(args):,} parameters"
    return "\n".join([head, "", "[model.args]", *lines])


def _num_kv_heads(args: Any) -> int | None:
    """Return the key-value heads in the large model's proportion; None without such a number."""
    num_heads = getattr(args, "n_heads", None)
    num_kv_heads = getattr(args, "n_kv_heads", None)
    if num_heads is None or num_kv_heads is None:
        return None
    return max(1, SIZES["n_heads"] * int(num_kv_heads) // int(num_heads))
