"""Make every rank print the batches of its training loop, for `experimental.custom_import`.

One line per step, in one write call, so that lines of several ranks do not mix:

    fed {"position": index after the step, "samples": [[index, tokens, labels, source], ...]}
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from torchtitan_like.data.batches.batch import Batch
from torchtitan_like.data.batches.iterators import TrainBatches


def _with_printing(read: Callable[[TrainBatches], Batch]) -> Callable[[TrainBatches], Batch]:
    def next_batch(self: TrainBatches) -> Batch:
        batch = read(self)
        rows = [
            [first + offset, *row]
            for first, *micro in zip(
                batch.first_samples,
                batch.tokens.tolist(),
                batch.labels.tolist(),
                batch.sources.tolist(),
                strict=True,
            )
            for offset, row in enumerate(zip(*micro, strict=True))
        ]
        os.write(1, f"fed {json.dumps({'position': batch.position, 'samples': rows})}\n".encode())
        return batch

    return next_batch


TrainBatches.__next__ = _with_printing(TrainBatches.__next__)  # type: ignore[assignment, method-assign]
