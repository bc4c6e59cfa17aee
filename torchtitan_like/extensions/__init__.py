"""Extension points for user code: the protocol of each kind, and `register_section`.

A setting names a function or class as "module:name". `experimental.custom_import` names the module
or .py file that registers config sections. docs/guides/extensions.md describes the protocols and
which of them are stable. No module of this package imports torch at its top level.
"""

from torchtitan_like.config.base import Section, field
from torchtitan_like.extensions.protocols import (
    Converter,
    DataSource,
    LearningRateSchedule,
    Loss,
    Observer,
    ObserverBuilder,
    OptimizerBuilder,
    SampleProcessor,
    Settings,
)
from torchtitan_like.extensions.sections import register_section

__all__ = [
    "Converter",
    "DataSource",
    "LearningRateSchedule",
    "Loss",
    "Observer",
    "ObserverBuilder",
    "OptimizerBuilder",
    "SampleProcessor",
    "Section",
    "Settings",
    "field",
    "register_section",
]
