"""Continue a prompt with the weights of a checkpoint, in one process."""

from __future__ import annotations

from pathlib import Path

import torch

from torchtitan_like.build import identify
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.loading import load_states
from torchtitan_like.checkpoint.start import Start, format_of
from torchtitan_like.checkpoint.stateful import ModelState
from torchtitan_like.checkpoint.step_folders import read_manifest, suggest_step
from torchtitan_like.checkpoint.votes import Votes
from torchtitan_like.config import JobConfig, load_stored_config
from torchtitan_like.data.errors import TokenizerError
from torchtitan_like.data.text.tokenizer import Tokenizer, load_tokenizer
from torchtitan_like.distributed.data_parallel import DTYPES
from torchtitan_like.distributed.initialize import materialize
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.stored_config import find_assets, import_custom
from torchtitan_like.util.run_directory import CONFIG, MANIFEST


def continue_prompt(
    step: Path,
    prompt: str,
    *,
    assets: str | None = None,
    custom_import: str = "",
    num_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> str:
    """Return `prompt` and its continuation by the model of a published step.

    assets: the tokenizer's folder; None: the folder in the step's config. custom_import: see
    `stored_config.import_custom`. Raises CheckpointError, ConfigError, TokenizerError.
    """
    if read_manifest(step) is None:
        raise CheckpointError(
            f"{step} is not a checkpoint: it has no {MANIFEST}. Expected a published step-N: "
            f"{suggest_step(step)}"
        )
    config = load_stored_config(step / CONFIG)
    import_custom(config, custom_import)
    folder = Path(assets or find_assets(config.model.tokenizer_folder, step))
    if not folder.expanduser().exists():
        raise TokenizerError(
            f"there is no tokenizer at {folder}. Expected the tokenizer of the model: give its "
            "folder with --assets"
        )
    tokenizer = load_tokenizer(folder)
    model = load_model(step, config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(seed)
    ids = tokenizer.encode(prompt)
    if tokenizer.bos_id is not None and config.data.add_bos:
        ids = [tokenizer.bos_id, *ids]
    if not ids:
        raise TokenizerError(
            "the prompt is empty. Expected text, because the model was trained without a "
            "beginning-of-text token: give a --prompt"
        )
    identity = identify(config.model)
    limits = identity.spec.constraints(identity.args)
    new_ids = generate(
        model,
        ids,
        num_tokens=num_tokens,
        temperature=temperature,
        top_k=top_k,
        stop=tokenizer.eos_id,
        window=limits.get("max_seq_len", config.training.seq_len),
    )
    return prompt + decode_continuation(tokenizer, ids, new_ids)


def load_model(step: Path, config: JobConfig, device: torch.device) -> torch.nn.Module:
    """Build the config's model in its stored dtype and load the weights. Raises CheckpointError."""
    identity = identify(config.model)
    with torch.device("meta"):
        model = identity.spec.build(identity.args).to(DTYPES[config.training.dtype])
    materialize(model, device)
    stored_format = format_of(step) or "step"
    manifest = read_manifest(step)
    start = Start("warm", 0, step, "named on the command line", None, stored_format, manifest)
    load_states(start, {"model": ModelState([model])}, Votes(HostGroup.alone()), identity)
    return model.eval()


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    prompt: list[int],
    *,
    num_tokens: int,
    temperature: float,
    top_k: int,
    stop: int | None,
    window: int,
) -> list[int]:
    """Sample up to `num_tokens` ids after `prompt`.

    temperature: 0 always takes the most likely token. stop: the id that ends the text. window: the
    maximum number of tokens in the model's input.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor([prompt], device=device)
    for _ in range(num_tokens):
        logits = model(tokens[:, -window:])[0, -1].float()
        if temperature == 0:
            next_token = logits.argmax(keepdim=True)
        else:
            likeliest = torch.topk(logits, min(top_k, logits.numel()))
            probabilities = torch.softmax(likeliest.values / temperature, dim=0)
            next_token = likeliest.indices[torch.multinomial(probabilities, 1)]
        if stop is not None and next_token.item() == stop:
            break
        tokens = torch.cat([tokens, next_token[None]], dim=1)
    return tokens[0, len(prompt) :].tolist()


def decode_continuation(tokenizer: Tokenizer, prompt: list[int], new_ids: list[int]) -> str:
    """Return the text of `new_ids` after `prompt`.

    Both are decoded together: some tokenizers drop the space at the start of a text.
    """
    before = tokenizer.decode(prompt)
    text = tokenizer.decode([*prompt, *new_ids])
    return text.removeprefix(before) if text.startswith(before) else tokenizer.decode(new_ids)
