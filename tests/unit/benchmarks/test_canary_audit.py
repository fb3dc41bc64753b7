"""The canaries are what they claim to be, and the attack finds those that are in."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks import canaries as planted
from benchmarks.canary_audit import Observed, gradient_scores, measure, table
from client_app.datasets.dataset import DataConfig, Example
from client_app.datasets.retail import public_examples
from client_app.gradients import batches, clipped_sums, example_gradients
from client_app.tasks.text_to_text import TextToText
from regionfed.randomness import SeededRandomness
from regionfed.vector import Layout
from tests.conftest import tiny_config

COINS = {"UK": [True, False, True, True], "US": [False, False, True, False]}
TEXTS = {region: [(f"{region} a", "toys"), (f"{region} b", "toys")] for region in COINS}
CANARIES = planted.Canaries([3, 5, 8, 9], TEXTS, COINS, {"UK": [True, False], "US": [False] * 2})
DATA = DataConfig(regions=2, clients_per_region=2, examples_per_client=6)


def test_a_gradient_canary_adds_the_clip_norm_at_its_own_coordinate(t5: TextToText) -> None:
    task = planted.PlantedTask(t5)
    layout = Layout.of(task.module)
    point = layout.read(task.module)
    ordinary = list(public_examples(0, 5))
    canaries = [e for e in CANARIES.examples("UK") if e.target == ""]

    def total(task: planted.PlantedTask | TextToText, examples: list[Example]) -> torch.Tensor:
        return clipped_sums(
            task,
            layout,
            point,
            examples,
            clip_norm=0.5,
            loss_cap=8.0,
            signs={},
            microbatch=3,
        ).total

    difference = total(task, ordinary + canaries) - total(t5, ordinary)
    expected = torch.zeros(layout.size)
    expected[[3, 8, 9]] = 0.5  # those that are in
    torch.testing.assert_close(difference, expected, atol=1e-5, rtol=0.0)


def test_canaries_are_planted_where_public_gradients_are_least(t5: TextToText) -> None:
    layout = Layout.of(t5.module)
    weights = layout.tensors(layout.read(t5.module))
    energy = torch.zeros(layout.size)
    for batch in batches(public_examples(0, 6), 4):
        gradients, _ = example_gradients(t5, weights, t5.encode(batch))
        energy += layout.flatten({n: g.square().sum(0) for n, g in gradients.items()})
    found = planted.quiet_coordinates(tiny_config(), t5, 7, public=6)
    assert len(set(found)) == 7
    rest = sorted(set(range(layout.size)) - set(found))
    assert energy[found].max() <= energy[rest].min()


def test_each_canary_that_is_in_is_on_one_device_and_no_other_is(tmp_path: Path) -> None:
    planted.save(CANARIES, tmp_path)
    dataset = planted.load(DataConfig(tmp_path, 2, 2, 6))
    bare = planted.load_retail(DATA)
    for region in ("UK", "US"):
        pairs = [(dataset.client(region, i), bare.client(region, i)) for i in range(2)]
        assert all(with_.test == without.test for with_, without in pairs)
        found = [e for with_, without in pairs for e in with_.train if e not in without.train]
        assert sorted(map(repr, found)) == sorted(map(repr, CANARIES.examples(region)))
    assert [e.source for e in CANARIES.examples("UK")] == ["3", "8", "9", "UK a"]


def test_scores_are_log_likelihood_ratios() -> None:
    """Of a sampled Gaussian whose deviation is seen, whatever all canaries share in a round."""
    config = tiny_config(sampling_rate=0.3, clip_norm=0.5)
    rng = np.random.default_rng(0)
    quantiles = 0.4 * stats.norm.ppf((np.arange(1001) + 0.5) / 1001)
    x = np.stack([rng.permutation(quantiles) for _ in range(4)])
    sums = {"UK": x + 3.0, "US": x - rng.normal(size=(4, 1))}
    x = np.concatenate([x, x], axis=1)
    absent, present = stats.norm(0.0, 0.4).pdf(x), stats.norm(0.5, 0.4).pdf(x)
    expected = np.log((0.7 * absent + 0.3 * present) / absent).sum(0)
    found = gradient_scores(Observed(sums, torch.zeros(1), None, 0.0), config)
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mode", ["dp", "none"])
def test_an_audit_of_a_tiny_training(
    mode: str, t5_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise the coins are read; with it the bound stays under what the ledger says."""
    # An auditor's coins are secret; a test's have to fall the same way each time.
    monkeypatch.setattr(planted, "secure_randomness", SeededRandomness(0))
    settings = {
        **{k: v for k, v in tiny_config().to_run_config().items() if k != "data-path"},
        "dataset": "benchmarks.canaries:load",
        "task": "benchmarks.canaries:make_task",
        "model": str(t5_folder),
        "privacy-mode": mode,
        "evaluation-privacy": "off",
        "user-steps": 0,
        # Every canary that is in is sampled, and the noised size tells that there are data.
        "sampling-rate": 0.95,
        "examples-per-client": 50,
        "size-noise-multiplier": 10.0,
        "target-epsilon": 4.0,
    }
    row = measure(settings, str(tmp_path), gradients=60, texts=4)
    found = row["attacks"]["gradient canaries, from updates"]["bound"]
    if mode == "none":
        assert row["epsilon"] is None
        assert found["epsilon"] > 1.5
    else:
        assert found["epsilon"] < row["epsilon"] <= 4.0
    json.dumps(row, allow_nan=False)
    assert len(table([{"level": mode, **row}])) == 4
