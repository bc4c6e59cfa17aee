"""Checks of a configuration with its model, tokenizer, datasets, layout and hardware.

No module of this package imports torch at its top level.
"""

from torchtitan_like.check.checker import (
    check_config,
    check_layout,
    check_loaded,
    in_command,
    load_checked,
    load_for_command,
    load_with_files,
)
from torchtitan_like.check.context import DeviceType

__all__ = [
    "DeviceType",
    "check_config",
    "check_layout",
    "check_loaded",
    "in_command",
    "load_checked",
    "load_for_command",
    "load_with_files",
]
