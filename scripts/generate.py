"""Continue a prompt with the weights of a checkpoint: `python scripts/generate.py STEP_DIR --prompt "To be"`.

STEP_DIR is a published step (`outputs/checkpoint/step-300`); the model and tokenizer are those of the `config.toml`
inside it, or the tokenizer that `--assets` names. One process, on the GPU if there is one; any layout's checkpoint can be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from scripts.named_in_config import add_import_flag, find_assets, import_custom
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.loading import load_states
from torchtitan_like.checkpoint.start import Start, format_of
from torchtitan_like.checkpoint.stateful import ModelState
from torchtitan_like.checkpoint.step_folders import read_manifest
from torchtitan_like.checkpoint.votes import Votes
from torchtitan_like.config import ConfigError, JobConfig, load_stored_config
from torchtitan_like.data.formats.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from torchtitan_like.distributed.data_parallel import DTYPES
from torchtitan_like.distributed.initialize import materialize
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.launch import identify


def load_model(step_folder: Path, config: JobConfig, device: torch.device) -> torch.nn.Module:
    """Build the config's model, in the type its weights are stored in, and fill it. Raises CheckpointError."""
    identity = identify(config.model)
    with torch.device("meta"):
        model = identity.spec.build(identity.args).to(DTYPES[config.training.dtype])
    materialize(model, device)
    found = format_of(step_folder) or "step"
    start = Start("warm", 0, step_folder, "named on the command line", None, found, read_manifest(step_folder))
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
    """Sample `num_tokens` ids after `prompt`; temperature 0 takes the likeliest each time. It sees `window` tokens back."""
    device = next(model.parameters()).device
    tokens = torch.tensor([prompt], device=device)
    for _ in range(num_tokens):
        logits = model(tokens[:, -window:])[0, -1].float()
        if temperature == 0:
            chosen = logits.argmax(keepdim=True)
        else:
            likeliest = torch.topk(logits, min(top_k, logits.numel()))
            probabilities = torch.softmax(likeliest.values / temperature, dim=0)
            chosen = likeliest.indices[torch.multinomial(probabilities, 1)]
        if stop is not None and chosen.item() == stop:
            break
        tokens = torch.cat([tokens, chosen[None]], dim=1)
    return tokens[0, len(prompt) :].tolist()


def continuation(tokenizer: Tokenizer, prompt: list[int], added: list[int]) -> str:
    """The text of `added` behind `prompt`: of tokens alone, some tokenizers leave out the blank that begins them."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *added])
    return whole.removeprefix(before) if whole.startswith(before) else tokenizer.decode(added)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step_dir", type=Path, help="a published checkpoint, such as outputs/checkpoint/step-300")
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--assets", metavar="PATH", help="the tokenizer's folder; without it, that of the run's config")
    parser.add_argument("--num-tokens", type=int, default=128, help="how many tokens to add at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 = always the likeliest token")
    parser.add_argument("--top-k", type=int, default=50, help="sample among the k likeliest tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    add_import_flag(parser)
    arguments = parser.parse_args(argv)
    if arguments.temperature < 0 or arguments.top_k < 1:
        parser.error("--temperature must be at least 0 and --top-k at least 1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if read_manifest(arguments.step_dir) is None:
            raise CheckpointError(f"{arguments.step_dir} is not a checkpoint: it has no valid manifest.json")
        config = load_stored_config(arguments.step_dir / "config.toml")
        import_custom(config, arguments.custom_import)
        assets = arguments.assets or find_assets(config.model.tokenizer_folder, arguments.step_dir)
        if not Path(assets).expanduser().exists():
            raise TokenizerError(f"there is no tokenizer at {assets}: name its folder with --assets")
        tokenizer: Tokenizer = load_tokenizer(assets)
        model = load_model(arguments.step_dir, config, device)
    except (ConfigError, TokenizerError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    torch.manual_seed(arguments.seed)
    prompt = tokenizer.encode(arguments.prompt)
    if tokenizer.bos_id is not None and config.data.add_bos:
        prompt = [tokenizer.bos_id, *prompt]
    if not prompt:
        print("the model was trained without a beginning-of-text token: give a --prompt", file=sys.stderr)
        return 2
    identity = identify(config.model)
    limits = identity.spec.constraints(identity.args)
    added = generate(
        model,
        prompt,
        num_tokens=arguments.num_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        stop=tokenizer.eos_id,
        window=limits.get("max_seq_len", config.training.seq_len),
    )
    print(arguments.prompt + continuation(tokenizer, prompt, added))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
