"""The measure of activations sees what a pass holds, and what checkpointing saves of it."""

import torch

from benchmarks.activations import Case, Measured, measure, peak_bytes, table

DEPTH = 8
SMALL = Case(
    f"t5:d_model=16,d_kv=8,d_ff=32,num_heads=2,num_layers={DEPTH},num_decoder_layers=1",
    "full",
    "fp32",
    length=128,
    microbatch=4,
    repeats=1,
)


def test_a_peak_is_the_most_that_was_held_at_once() -> None:
    """Of three buffers of 4 MB, two at a time."""

    def work() -> None:
        first = torch.ones(2**20)
        second = torch.ones(2**20)
        del first
        third = torch.ones(2**20)
        del second, third

    assert peak_bytes(work) == 2 * 4 * 2**20


def test_checkpointing_holds_less_of_a_deep_model() -> None:
    """The activations of one block and what goes into eight, instead of those of eight."""
    found = measure(SMALL)
    assert found.peak_checkpointing < 0.5 * found.peak
    assert found.trained > 0
    (row,) = table([(SMALL, found)])[2:]
    assert "full, fp32 | 128 | 4 |" in row


def test_a_row_says_both_peaks_and_the_time() -> None:
    """As the page shows it."""
    row = table([(SMALL, Measured(2**30, 2**20, 1.5, 7))])[-1]
    assert row.endswith("| 1.0 GiB | 1.0 MiB | x 1.5 |")
