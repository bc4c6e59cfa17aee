"""What an older torch cannot do: our config check refuses it, or no trainer asks for it."""

import re

import pytest

from torchtitan_like.preflight.context import installed_torch_release

# Backward passes in two parts: the rule old-zero-bubble. And Inductor's pass for asynchronous tensor parallelism takes fewer
# collectives of what is computed again, and cannot gather the logits of a whole model, which a trainer does without.
SINCE_2_13 = re.compile(
    r"tests/distributed/.*(ZeroBubble|DualPipe|-izb-|-zbv-|-dualpipe-|in a V|backward in two parts|with other strides"
    r"|memory_for_messages|_overlap\[(recomputed|whole model))"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if installed_torch_release() < (2, 13):
        for item in items:
            if SINCE_2_13.search(item.nodeid):
                item.add_marker(pytest.mark.skip(reason="needs torch 2.13"))
