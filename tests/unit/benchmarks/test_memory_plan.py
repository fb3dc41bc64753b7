"""The memory plan counts what the code would send and hold; the pages show what it says."""

import json
import math
from pathlib import Path

import pytest

from benchmarks import activations
from benchmarks.memory_plan import (
    COORDINATOR,
    DEVICE,
    MICROBATCH,
    REGIONS,
    UPLINK,
    WORLD,
    WORLD_PER_REGION,
    Plan,
    plan,
    table,
    traffic,
    traffic_table,
)
from regionfed.config import Config

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"


def test_a_model_in_full_crosses_at_four_bytes_a_number() -> None:
    """At true shapes; a tied matrix counts once."""
    found = plan("t5", "small", "full", "fp32")
    assert found.trained == found.parameters == 60_506_624  # as published
    assert found.wire == 4 * found.trained and found.chunks == 15
    assert found.device == 4 * found.trained * (2 + MICROBATCH + DEVICE)
    assert found.coordinator == COORDINATOR * found.wire
    assert found.uplink == UPLINK * found.wire
    assert found.world == (WORLD + WORLD_PER_REGION * (REGIONS - 1)) * found.wire


def test_t5_3b_by_lora_crosses_in_a_few_chunks() -> None:
    """72 attentions, q and v each: rank 16 times the widths on both sides."""
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    found = plan("t5", "3b", "lora", "bf16")
    assert found.trained == 72 * 2 * 16 * (1024 + 4096)
    assert found.wire == 4 * found.trained
    assert found.parameters > 2_800_000_000
    assert found.world == 4 * found.parameters  # the model that it starts from outweighs vectors
    assert "t5:3b" in table([found])[-1]


def test_traffic_follows_the_schedule() -> None:
    """Two vectors down more in the rounds that search, score or adapt."""
    every = Config(rho_every=0, evaluate_every=10, user_steps=0, rounds=10)
    assert traffic(100, every) == {
        "region down": 300.0,
        "region up": 100.0,
        "device down": pytest.approx(120.0),
        "device up": 100.0,
    }


def test_the_plan_s_vectors_are_those_that_were_measured() -> None:
    """What T5-small's vector added to each process, rounded up."""
    found = json.loads((RESULTS / "latency.json").read_text(encoding="utf-8"))["sizes"]
    vector = 4 * found["T5-small"]["parameters"] / 2**20
    small, large = found["tiny"]["peak_mib"], found["T5-small"]["peak_mib"]
    held = {role: math.ceil((large[role] - small[role]) / vector) for role in large}
    assert held["coordinator"] == COORDINATOR and held["uplink"] == UPLINK
    assert held["world"] == WORLD
    assert held["device"] == 2 + 2 + DEVICE  # with a microbatch of 2


def test_the_pages_show_what_the_results_say() -> None:
    """And the results are what the code computes."""
    rows = json.loads((RESULTS / "memory_plan.json").read_text(encoding="utf-8"))
    plans = [Plan(**row) for row in rows]
    assert plan("roberta", "base", "full", "fp32") in plans
    models = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert "\n".join(table(plans)) in models
    deployment = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    assert "\n".join(traffic_table(plans)) in deployment
    found = json.loads((RESULTS / "activations.json").read_text(encoding="utf-8"))
    assert "\n".join(activations.table([activations.split(row) for row in found])) in models
