"""Rules of rotary scaling that configs need too. Never imports torch."""

from __future__ import annotations

import math

# The scalings of rotary frequencies that transformers has for whole models.
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor of rotated queries and keys, `0.1 mscale ln(factor) + 1`.

    arXiv:2309.00071, equation 22; `mscale` is DeepSeek's. 1 if the context is not longer.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
