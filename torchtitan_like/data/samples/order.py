"""The order of samples in an epoch, as a closed formula from position to sample.

A closed formula can start at any position without reading the positions before it.

- Adjacent samples on disk form blocks of ``BLOCK_SAMPLES``. The blocks are permuted over the epoch.
- Then the samples of each window of ``WINDOW_BLOCKS`` consecutive permuted blocks are permuted. A
  reader therefore touches only one window of the file, which fits into the page cache. A dataset of
  less than one window is permuted as a whole.
- The blocks start at a different sample in every epoch. The block boundaries, and the incomplete
  block at the end, therefore differ between epochs.

All arithmetic uses unsigned 64-bit integers: the order is the same on every platform and with every
version of numpy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.util.splitmix import Integers, mix64

# Increase it with any change of the mapping. It is saved with the data position.
PERMUTATION_VERSION = 1
BLOCK_SAMPLES = 64
WINDOW_BLOCKS = 256

_WINDOW_SAMPLES = BLOCK_SAMPLES * WINDOW_BLOCKS
_HALF_ROUNDS = 8
_ROTATION, _BLOCKS, _WINDOWS = (np.uint64(stage) for stage in (1, 2, 3))


def shuffled(
    positions: NDArray[np.int64], num_samples: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Return the samples at ``positions`` of epoch ``epoch``: a bijection of [0, num_samples).

    positions: any shape, each in [0, num_samples).
    """
    flat = positions.astype(np.uint64).ravel()
    epoch_key = mix64(mix64(np.array([seed % 2**64], np.uint64)) ^ np.uint64(epoch))
    window = flat // np.uint64(_WINDOW_SAMPLES)
    offset = _permute_windows(flat % np.uint64(_WINDOW_SAMPLES), window, num_samples, epoch_key)

    block = window * np.uint64(WINDOW_BLOCKS) + offset // np.uint64(BLOCK_SAMPLES)
    num_blocks = num_samples // BLOCK_SAMPLES
    is_complete = block < np.uint64(num_blocks)
    block[is_complete] = _permute(block[is_complete], num_blocks, mix64(epoch_key ^ _BLOCKS))
    unrotated = block * np.uint64(BLOCK_SAMPLES) + offset % np.uint64(BLOCK_SAMPLES)

    rotation = mix64(epoch_key ^ _ROTATION) % np.uint64(num_samples)
    samples: NDArray[np.int64] = ((unrotated + rotation) % np.uint64(num_samples)).astype(np.int64)
    return samples.reshape(positions.shape)


def _permute_windows(
    offsets: Integers, window: Integers, num_samples: int, epoch_key: Integers
) -> Integers:
    """Permute the offsets in each window. The last window may be shorter than the others."""
    keys = mix64(mix64(epoch_key ^ _WINDOWS) ^ window)
    num_full_windows, last_size = divmod(num_samples, _WINDOW_SAMPLES)
    is_last = window == np.uint64(num_full_windows)
    permuted = np.empty_like(offsets)
    permuted[~is_last] = _permute(offsets[~is_last], _WINDOW_SAMPLES, keys[~is_last])
    permuted[is_last] = _permute(offsets[is_last], last_size, keys[is_last])
    return permuted


def _permute(values: Integers, size: int, keys: Integers) -> Integers:
    """Apply a keyed bijection of [0, size) by cycle walking.

    A Feistel network on the next power of two is applied until the result is below ``size`` (Black,
    Rogaway 2002: "Ciphers with arbitrary finite domains", §3.2). keys: one key, or one per value.
    """
    if not len(values):
        return values
    bits = (size - 1).bit_length()
    keys = np.broadcast_to(keys, values.shape)
    result = _feistel(values, bits, keys)
    outside = np.flatnonzero(result >= np.uint64(size))
    while len(outside):
        result[outside] = _feistel(result[outside], bits, keys[outside])
        outside = outside[result[outside] >= np.uint64(size)]
    return result


def _feistel(values: Integers, bits: int, keys: Integers) -> Integers:
    """Apply a keyed bijection of [0, 2**bits): XOR each half of the bits with a hash of the other.

    The halves have different widths if ``bits`` is odd.
    """
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = (np.uint64(2**width - 1) for width in (bits // 2, bits - bits // 2))
    low = values & low_mask
    high = values >> low_bits
    for half_round in range(0, _HALF_ROUNDS, 2):
        high = high ^ (mix64((keys + np.uint64(half_round)) ^ (low << np.uint64(32))) & high_mask)
        low = low ^ (mix64((keys + np.uint64(half_round + 1)) ^ (high << np.uint64(32))) & low_mask)
    joined: Integers = (high << low_bits) | low
    return joined
