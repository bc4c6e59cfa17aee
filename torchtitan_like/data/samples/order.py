"""The order of samples in an epoch: a closed formula from position to sample, so that any position is reached at once.

Samples that lie together on disk form blocks of ``BLOCK_SAMPLES``. The blocks are permuted over the whole epoch;
then the samples of each window of ``WINDOW_BLOCKS`` consecutive (permuted) blocks are permuted among themselves. A
reader at any position therefore touches one window of the file only, which the page cache holds, and a text of less
than one window is permuted as a whole. The blocks start at another sample in every epoch, so that their borders,
and the incomplete block that a size which is no multiple of ``BLOCK_SAMPLES`` leaves over, differ from epoch to
epoch.

Everything is unsigned 64-bit integer arithmetic: the order is the same on every platform and with every version of
numpy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.util.splitmix import Integers, mix64

# Changes whenever any position of any epoch would map to another sample. Saved with the data position.
PERMUTATION_VERSION = 1
BLOCK_SAMPLES = 64
WINDOW_BLOCKS = 256

_WINDOW_SAMPLES = BLOCK_SAMPLES * WINDOW_BLOCKS
_HALF_ROUNDS = 8
_ROTATION, _BLOCKS, _WINDOWS = (np.uint64(stage) for stage in (1, 2, 3))


def shuffled(positions: NDArray[np.int64], num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Samples at ``positions`` (any shape, each in [0, num_samples)) of epoch ``epoch``: a bijection of [0,
    num_samples).
    """
    where = positions.astype(np.uint64).ravel()
    epoch_key = mix64(mix64(np.array([seed % 2**64], np.uint64)) ^ np.uint64(epoch))
    window = where // np.uint64(_WINDOW_SAMPLES)
    inside = _permute_windows(where % np.uint64(_WINDOW_SAMPLES), window, num_samples, epoch_key)

    slot = window * np.uint64(WINDOW_BLOCKS) + inside // np.uint64(BLOCK_SAMPLES)
    num_blocks = num_samples // BLOCK_SAMPLES
    whole = slot < np.uint64(num_blocks)
    slot[whole] = _permute(slot[whole], num_blocks, mix64(epoch_key ^ _BLOCKS))
    cut = slot * np.uint64(BLOCK_SAMPLES) + inside % np.uint64(BLOCK_SAMPLES)

    rotation = mix64(epoch_key ^ _ROTATION) % np.uint64(num_samples)
    samples: NDArray[np.int64] = ((cut + rotation) % np.uint64(num_samples)).astype(np.int64)
    return samples.reshape(positions.shape)


def _permute_windows(inside: Integers, window: Integers, num_samples: int, epoch_key: Integers) -> Integers:
    """Permute the samples of each window; the last window may be shorter than the others."""
    keys = mix64(mix64(epoch_key ^ _WINDOWS) ^ window)
    whole_windows, last_size = divmod(num_samples, _WINDOW_SAMPLES)
    is_last = window == np.uint64(whole_windows)
    permuted = np.empty_like(inside)
    permuted[~is_last] = _permute(inside[~is_last], _WINDOW_SAMPLES, keys[~is_last])
    permuted[is_last] = _permute(inside[is_last], last_size, keys[is_last])
    return permuted


def _permute(values: Integers, size: int, keys: Integers) -> Integers:
    """Keyed bijection of [0, size): a Feistel network on the next power of two, walked along its cycle until inside.

    ``keys`` has one key, or one for each value (Black, Rogaway 2002: "Ciphers with arbitrary finite domains", §3.2).
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
    """Keyed bijection of [0, 2**bits): the two halves (of unequal width where bits is odd) are XORed with a hash of
    each other.
    """
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = (np.uint64(2**width - 1) for width in (bits // 2, bits - bits // 2))
    low, high = values & low_mask, values >> low_bits
    for half_round in range(0, _HALF_ROUNDS, 2):
        high = high ^ (mix64((keys + np.uint64(half_round)) ^ (low << np.uint64(32))) & high_mask)
        low = low ^ (mix64((keys + np.uint64(half_round + 1)) ^ (high << np.uint64(32))) & low_mask)
    joined: Integers = (high << low_bits) | low
    return joined
