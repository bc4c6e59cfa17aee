"""Files in the package, which work without its repository: train configs and a tokenizer."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
TRAIN_CONFIGS = PACKAGE / "train_configs"
TOKENIZER = PACKAGE / "assets" / "tokenizer"
TOKENIZER_IN_REPOSITORY = "./tests/assets/tokenizer"  # TorchTitan's name of its debug tokenizer


def config_names() -> list[str]:
    """Return the names of the bundled configs, such as recipes/dense.toml."""
    files = TRAIN_CONFIGS.rglob("*.toml")
    return sorted(file.relative_to(TRAIN_CONFIGS).as_posix() for file in files)


def find_config(path: str, folder: Path = Path()) -> Path:
    """Return the path of a config or a curve, or the bundled one if no such file exists.

    A relative `path` starts in `folder`.
    """
    file = folder / Path(path).expanduser()
    bundled = TRAIN_CONFIGS / path
    is_name = not Path(path).is_absolute() and ".." not in Path(path).parts
    return bundled if is_name and not file.exists() and bundled.is_file() else file


def find_assets(path: str) -> str:
    """Return the folder of tokenizer and assets.

    If the default folder does not exist in the current folder, it is the bundled one.
    """
    if Path(path) == Path(TOKENIZER_IN_REPOSITORY) and not Path(path).exists():
        return str(TOKENIZER)
    return path
