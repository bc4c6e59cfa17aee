"""Checks that need more than one room: configuration x model x tokenizer x layout. Nothing here imports torch."""

from torchtitan_like.preflight.checker import check, load_checked
from torchtitan_like.preflight.context import DeviceType

__all__ = ["DeviceType", "check", "load_checked"]
