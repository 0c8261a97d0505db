"""Configs refuse what no chip can run, at birth."""

import re
from functools import partial

import pytest

from pallas_loss import tuning
from pallas_loss.tuning import heuristics


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_n": 384}, "768 columns of tensor memory"),
        ({"stages": 6}, "bytes of shared memory"),
        ({"collective": False, "stages": 4}, "bytes of shared memory"),
        ({"stages": 1}, "stages must be at least 2"),
        ({"stages": 0}, "stages must be a positive integer, got 0"),
        ({"block_n": 96}, "block_n must be a multiple of 64"),
        ({"tile_k": 96}, "tile_k must be a multiple of 64"),
        ({"epilogue_n": 96}, "epilogue_n must divide block_n / 2"),
        ({"snake_minor": "k"}, "snake_minor must be 'm' or 'n'"),
    ],
)
def test_blackwell_config_refuses(change, message):
    """Each limit of the chip and of the kernel, with the value that is past it."""
    with pytest.raises(ValueError, match=re.escape(message)):
        tuning.BlackwellConfig(**change)


def test_blackwell_config_counts():
    """The default takes all tensor memory, and two blocks to a tile halve what one loads."""
    pair = tuning.BlackwellConfig()
    alone = tuning.BlackwellConfig(collective=False, stages=3)
    assert pair.tmem_columns == tuning.TMEM_COLUMNS
    assert pair.tiles(8192, 128256) == (64, 501)
    assert alone.tiles(8193, 128257) == (65, 502)
    assert pair.tiles(8193, 128256) == (66, 501)
    # A step is (128 rows + 128 or 256 columns) x 64; the stores have 4 buffers of 128 x 128 bytes.
    assert pair.smem_bytes() == 5 * (128 + 128) * 64 * 2 + 65536
    assert alone.smem_bytes() == 3 * (128 + 256) * 64 * 2 + 65536


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lines": 3, "steps": 2}, "steps must divide lines"),
        ({"lines": 4, "steps": 4}, "into two or more"),
        ({"lines": 1}, "into two or more"),
        ({"lines": 66}, "lines must be at most 64"),
        ({"warpgroups": 9, "slots": 3, "ring": 2}, "warpgroups must be at most 8, 1024 threads"),
        ({"slots": 9}, "more than 32 slots"),
        ({"ring": 1}, "ring must be at least 2"),
        ({"ring": 7}, "slots must be at least ring + ahead"),
        ({"ahead": 0}, "ahead must be a positive integer, got 0"),
        ({"in_l2": 0}, "in_l2 must be a positive integer, got 0"),
    ],
)
def test_row_config_refuses(change, message):
    """What would not compile, not launch or wait for itself."""
    with pytest.raises(ValueError, match=re.escape(message)):
        tuning.RowConfig(**{"lines": 2, **change})


def test_a_lean_split_takes_half_the_memory():
    """Of the vocabulary, at a real head; a small one is not split at all."""
    split = partial(heuristics.vocab_split, 8192, 4096, time_of=lambda rows, cols: 1.0)
    assert split(128256, lean=True) <= split(128256) / 2 and split(128256, lean=True) % 256 == 0
    assert split(2048, lean=True) == 2048
