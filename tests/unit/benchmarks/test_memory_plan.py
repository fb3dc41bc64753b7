"""The memory plan counts what the code would send and hold."""

import pytest

from benchmarks.memory_plan import MICROBATCH, plan, table


def test_a_model_in_full_crosses_at_four_bytes_a_number() -> None:
    """At true shapes; a tied matrix counts once."""
    found = plan("t5", "small", "full", "fp32")
    assert found.trained == found.parameters == 60_506_624  # as published
    assert found.wire == 4 * found.trained and found.chunks == 15
    assert found.device == 4 * found.trained * (2 + MICROBATCH + 2)
    assert found.region == found.server == 6 * found.wire


def test_t5_3b_by_lora_crosses_in_a_few_chunks() -> None:
    """72 attentions, q and v each: rank 16 times the widths on both sides."""
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    found = plan("t5", "3b", "lora", "bf16")
    assert found.trained == 72 * 2 * 16 * (1024 + 4096)
    assert found.wire == 4 * found.trained
    assert found.parameters > 2_800_000_000
    assert "t5:3b" in table([found])[-1]
