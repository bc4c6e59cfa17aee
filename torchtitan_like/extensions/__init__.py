"""Extension points for user code: `register`, and the protocol of each kind.

The module or .py file in `experimental.custom_import` registers extensions when it is imported.
docs/guides/extensions.md describes the protocols and which of them are stable. No module of this
package imports torch at its top level.
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
from torchtitan_like.extensions.registering import register

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
    "register",
]
