"""Apply the model converters of user code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtitan_like.extensions.names import ExtensionError, resolve_name
from torchtitan_like.extensions.protocols import Settings

if TYPE_CHECKING:
    from torch import nn


def convert(name: str, model: nn.Module, settings: Settings) -> None:
    """Apply the user's converter to a model on the meta device, in place.

    Raises ExtensionError if names, shapes or dtypes of its saved tensors change.
    """
    before = _saved_tensors(model)
    resolve_name(name, "converter")(model, settings)
    after = _saved_tensors(model)
    changed = sorted(
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    )
    if changed:
        key = changed[0]
        raise ExtensionError(
            f"the converter {name} changes {len(changed)} saved tensors, such as {key} from "
            f"{before.get(key)} to {after.get(key)}. Expected the same names, shapes and dtypes, "
            "which checkpoints and sharding depend on: keep them"
        )


def _saved_tensors(model: nn.Module) -> dict[str, str]:
    return {
        key: f"{value.dtype} {tuple(value.shape)} on {value.device}"
        for key, value in model.state_dict().items()
    }
