"""Models: single-device modules, and a `ModelSpec` for each that the framework reads."""

from torchtitan_like.models.spec import (
    InitRule,
    ModelSpec,
    StageTensor,
    get_spec,
    register,
    resolve_args,
)

__all__ = ["InitRule", "ModelSpec", "StageTensor", "get_spec", "register", "resolve_args"]
