"""Models: single-device modules that know nothing of ranks, and what each hands to the framework."""

from torchtitan_like.models.spec import (
    InitRule,
    ModelSpec,
    StageTensor,
    get_spec,
    register,
    resolve_args,
)

__all__ = ["InitRule", "ModelSpec", "StageTensor", "get_spec", "register", "resolve_args"]
