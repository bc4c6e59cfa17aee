"""Skip the tests that need torch 2.13."""

import re

import pytest

from torchtitan_like.check.context import installed_torch_release

# The config rule old-zero-bubble rejects schedules that split the backward pass.
# In older releases Inductor's pass for asynchronous tensor parallelism fuses fewer collectives of
# recomputed operations. It also fails on the gathered logits of a whole model, which no trainer
# computes.
SINCE_2_13 = re.compile(
    r"tests/distributed/.*(ZeroBubble|DualPipe|-izb-|-zbv-|-dualpipe-|in a V|backward in two parts"
    r"|with other strides|memory_for_messages|_overlap\[(recomputed|whole model))"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if installed_torch_release() < (2, 13):
        for item in items:
            if SINCE_2_13.search(item.nodeid):
                item.add_marker(pytest.mark.skip(reason="needs torch 2.13"))
