"""The coordinator: what it releases is noised, charged, saved, and said only once."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from region_app.state import RegionState, StateFolder
from regionfed.config import Config
from regionfed.contract import (
    AdaptRequest,
    GradientReply,
    GradientRequest,
    LossReply,
    LossRequest,
    ProfileReply,
    ProfileRequest,
    RegionUpdate,
    ScoreReply,
    ScoreRequest,
)
from regionfed.errors import PrivacyError, RunError
from regionfed.privacy.accountant import count_releases, epsilon
from regionfed.privacy.plan import LOSS_CAP, VOTE_BOUND, plan_privacy
from strategies.personalisers.none import NoPersonaliser
from tests.conftest import (
    TASKS,
    Script,
    coordinator_of,
    personalise_request,
    steady,
    tiny_config,
    train_request,
)

P = 5
THETA = torch.linspace(-1.0, 1.0, P)
LEVEL = 1e-3


def open_config(**settings: Any) -> Config:
    """Return a configuration without privacy: every number can be checked by hand."""
    return tiny_config(privacy_mode="none", **settings)


def ones(scale: float = 1.0) -> torch.Tensor:
    return torch.full((P,), scale)


def ledger_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "ledger.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def crash(_: Any) -> Any:
    raise ValueError("the device is on fire")


# -------------------------------------------------------------------------------------- train
def test_the_update_is_the_sum_over_the_expected_batch(tmp_path: Path) -> None:
    """Sum of the devices' sums, divided by rate times released size; loss and sketch alike."""

    def device(s: float) -> Script:
        return Script(
            gradient=lambda r: GradientReply(ones(s), torch.full((r.sketch_size,), 2 * s), s),
            profile=lambda _: ProfileReply(100),
        )

    scripts = [device(1.0), device(2.0)]
    update = coordinator_of(tmp_path, scripts, open_config()).train(train_request(THETA))
    batch = 0.5 * 200
    assert torch.allclose(update.update, ones(3.0) / batch)
    assert torch.allclose(update.sketch, torch.full((8,), 6.0) / batch)
    assert update.loss == pytest.approx(3.0 / batch)
    assert update.examples == 200.0 and update.region == "North"
    assert update.update_noise_std == update.sketch_noise_std == 0.0
    assert update.epsilon == -1.0


def test_devices_are_asked_what_the_settings_say(tmp_path: Path) -> None:
    """Rate, clip bound, cap and sketch; every device the same, and theta as it came."""
    scripts = [steady(ones()), steady(ones())]
    config = open_config(clip_norm=0.25)
    coordinator_of(tmp_path, scripts, config).train(train_request(THETA))
    for script in scripts:
        profile, gradient = script.asked
        assert isinstance(profile, ProfileRequest) and isinstance(gradient, GradientRequest)
        assert (gradient.round, gradient.layout) == (1, "layout")
        assert (gradient.sampling_rate, gradient.clip_norm) == (0.5, 0.25)
        assert (gradient.loss_cap, gradient.sketch_size) == (LOSS_CAP, 8)
        assert torch.equal(gradient.point, THETA)
    seeds = {script.asked[1].sketch_seed for script in scripts}
    assert len(seeds) == 1


@pytest.mark.parametrize("conflict", ["debiased", "raw"])
def test_no_sketch_is_asked_for_where_none_is_used(tmp_path: Path, conflict: str) -> None:
    """Then none is released, nor paid for."""
    script = steady(ones())
    update = coordinator_of(tmp_path, [script], open_config(conflict=conflict)).train(
        train_request(THETA)
    )
    assert script.asked[-1].sketch_size == 0
    assert update.sketch.numel() == 0 and update.sketch_noise_std == 0.0
    assert "sketch" not in ledger_of(tmp_path)[-1]["release"]


def released_noise(
    folder: Path, config: Config, p: int, totals: list[float]
) -> tuple[RegionUpdate, torch.Tensor]:
    """Return an update and, in units of the sum, how far it is from the truth."""
    scripts = [steady(torch.full((p,), t)) for t in totals]
    update = coordinator_of(folder, scripts, config).train(train_request(torch.zeros(p)))
    batch = config.sampling_rate * update.examples
    return update, update.update.double() * batch - sum(totals)


@pytest.mark.parametrize("conflict", ["sketch", "debiased", "raw"])
@pytest.mark.parametrize(
    "totals", [[0.0], [0.75, -2.0, 4.0]], ids=["empty sample", "three devices"]
)
def test_the_released_noise_is_sigma_times_the_clip_bound(
    tmp_path: Path, totals: list[float], conflict: str
) -> None:
    """D2, D5: over the whole vector, once, whatever the sum: chi-square and Kolmogorov-Smirnov."""
    p = 20_000
    config = tiny_config(conflict=conflict)
    update, noise = released_noise(tmp_path, config, p, totals)
    plan = plan_privacy(config, sketch=conflict == "sketch", votes=True)
    part = next(part for part in plan.update.parts if part.name == "update")
    sigma_c = part.noise_multiplier * config.clip_norm
    assert part.noise_std == sigma_c > 0.0
    low, high = stats.chi2.interval(1.0 - LEVEL, p)
    assert low < float((noise / sigma_c).square().sum()) < high
    assert stats.kstest((noise / sigma_c).numpy(), "norm").pvalue > LEVEL
    assert update.update_noise_std == pytest.approx(
        sigma_c / (config.sampling_rate * update.examples)
    )


def test_sketch_and_loss_are_noised_by_their_own_bounds(tmp_path: Path) -> None:
    """Chi-square over a large sketch; the loss over rounds."""
    k = 4096
    config = tiny_config(sketch_size=k, rounds=30)
    coordinator = coordinator_of(tmp_path, [steady(ones())], config)
    updates = [coordinator.train(train_request(THETA, r)) for r in range(1, 31)]
    parts = {p.name: p for p in plan_privacy(config, sketch=True, votes=True).update.parts}
    batch = config.sampling_rate * updates[0].examples
    noise = updates[0].sketch.double() * batch / parts["sketch"].noise_std
    low, high = stats.chi2.interval(1.0 - LEVEL, k)
    assert low < float(noise.square().sum()) < high
    losses = torch.tensor([u.loss for u in updates]).double() * batch / parts["loss"].noise_std
    low, high = stats.chi2.interval(1.0 - LEVEL, len(updates))
    assert low < float(losses.square().sum()) < high
    assert updates[0].sketch_noise_std == pytest.approx(parts["sketch"].noise_std / batch)


def test_rounds_regions_and_parts_have_noise_of_their_own(tmp_path: Path) -> None:
    """No draw is used twice: a difference of two releases does not cancel it."""
    p = 4096
    config = tiny_config(sketch_size=p)
    vectors = []
    for region in ("North", "South"):
        coordinator = coordinator_of(
            tmp_path / region, [steady(torch.zeros(p))], config, region=region
        )
        for round_ in (1, 2):
            update = coordinator.train(train_request(torch.zeros(p), round_))
            vectors += [update.update, update.sketch]
    correlations = torch.corrcoef(torch.stack(vectors)) - torch.eye(len(vectors))
    assert float(correlations.abs().max()) < 5.0 / math.sqrt(p)


def test_the_size_is_released_once_with_its_own_noise(tmp_path: Path) -> None:
    """Charged once, kept for good, also over a restart."""
    config = tiny_config()
    scripts = [steady(ones())]
    first = coordinator_of(tmp_path, scripts, config)
    sizes = {first.train(train_request(THETA, r)).examples for r in (1, 2)}
    again = coordinator_of(tmp_path, scripts, config)
    sizes.add(again.train(train_request(THETA, 3)).examples)
    assert len(sizes) == 1
    assert sizes.pop() != 1000.0
    assert [e["release"] for e in ledger_of(tmp_path)].count("region size") == 1
    assert sum(isinstance(r, ProfileRequest) for r in scripts[0].asked) == 1


def test_a_release_is_charged_as_what_it_is(tmp_path: Path) -> None:
    """One joint event per round, with z_eff and the rate; the reply carries the epsilon."""
    config = tiny_config()
    update = coordinator_of(tmp_path, [steady(ones())], config).train(train_request(THETA))
    plan = plan_privacy(config, sketch=True, votes=True)
    size, event = ledger_of(tmp_path)
    assert size["release"] == "region size" and size["sampling_rate"] == 1.0
    assert (event["round"], event["region"], event["unit"]) == (1, "North", "example")
    assert event["noise_multiplier"] == plan.update.noise_multiplier
    assert event["sampling_rate"] == 0.5
    assert event["sensitivity"] == {"update": 0.5, "loss": LOSS_CAP, "sketch": 0.5}
    assert 0.0 < update.epsilon <= config.target_epsilon


def test_the_ledger_is_written_before_anything_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D9: a crash right after the noise was drawn finds the release already charged."""
    coordinator = coordinator_of(tmp_path, [steady(ones())], tiny_config())

    def power_cut(*_: Any, **__: Any) -> None:
        assert ledger_of(tmp_path)[-1]["release"].startswith("update")
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(StateFolder, "save_release", power_cut)
        with pytest.raises(OSError, match="power cut"):
            coordinator.train(train_request(THETA))
    assert [e["round"] for e in ledger_of(tmp_path)] == [0, 1]


def test_over_budget_nothing_is_released(tmp_path: Path) -> None:
    """Rounds beyond the plan are refused; no reply, no event, no saved release."""
    config = tiny_config(rounds=2, rho_every=0)
    coordinator = coordinator_of(tmp_path, [steady(ones())], config)
    for round_ in (1, 2):
        coordinator.train(train_request(THETA, round_))
    before = ledger_of(tmp_path)
    with pytest.raises(PrivacyError, match="round 3"):
        coordinator.train(train_request(THETA, 3))
    assert ledger_of(tmp_path) == before
    assert StateFolder(tmp_path).load_release("update", 3) is None


@pytest.mark.parametrize("restart", [False, True])
def test_a_retried_train_returns_the_same_bytes_and_charges_nothing(
    tmp_path: Path, restart: bool
) -> None:
    """D10: also after a restart, and although the devices would answer differently now."""
    config = tiny_config(noise_seed=-1)
    first = coordinator_of(tmp_path, [steady(ones())], config)
    before = first.train(train_request(THETA))
    charged = ledger_of(tmp_path)
    changed = [steady(ones(99.0))]
    again = coordinator_of(tmp_path, changed, config) if restart else first
    after = again.train(train_request(THETA))
    assert after.update.numpy().tobytes() == before.update.numpy().tobytes()
    assert after.sketch.numpy().tobytes() == before.sketch.numpy().tobytes()
    assert (after.loss, after.examples, after.epsilon) == (
        before.loss,
        before.examples,
        before.epsilon,
    )
    assert ledger_of(tmp_path) == charged
    assert changed[0].asked == []


# --------------------------------------------------------------------------- what goes wrong
def test_a_bad_reply_is_quarantined_and_stays_in_the_regions_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A4: nan, another shape and a crash cost those devices' part of the sum, and nothing else."""
    scripts = [
        steady(ones(1.0)),
        steady(ones(1.0), gradient=crash),
        steady(torch.ones(P + 1)),
        steady(ones(2.0)),
    ]
    update = coordinator_of(tmp_path, scripts, open_config()).train(train_request(THETA))
    assert torch.allclose(update.update, ones(3.0) / (0.5 * 4000))
    refused = [m for m in caplog.messages if m.startswith("region North: ")]
    assert len(refused) == 2


def test_who_drops_out_does_not_lower_the_noise(tmp_path: Path) -> None:
    """D4: the noise, the denominator and the charge are those that were planned."""
    p = 20_000
    config = tiny_config()
    scripts = [steady(torch.zeros(p)), steady(torch.zeros(p), gradient=crash)]
    update = coordinator_of(tmp_path, scripts, config).train(train_request(torch.zeros(p)))
    plan = plan_privacy(config, sketch=True, votes=True)
    noise = update.update.double() / update.update_noise_std
    low, high = stats.chi2.interval(1.0 - LEVEL, p)
    assert low < float(noise.square().sum()) < high
    assert update.update_noise_std * 0.5 * update.examples == pytest.approx(
        plan.update.parts[0].noise_std
    )


def test_when_no_device_answers_the_region_sits_out_and_releases_nothing(tmp_path: Path) -> None:
    """An error that says so; the update is not charged."""
    scripts = [steady(ones(), gradient=crash), steady(ones(), gradient=crash)]
    coordinator = coordinator_of(tmp_path, scripts, tiny_config())
    with pytest.raises(RunError, match="none of its devices answered"):
        coordinator.train(train_request(THETA))
    assert [e["release"] for e in ledger_of(tmp_path)] == ["region size"]


def test_a_region_without_data_sits_out(tmp_path: Path) -> None:
    """A1: no division by zero, and devices are not asked for gradients."""
    script = steady(ones(), profile=lambda _: ProfileReply(0))
    coordinator = coordinator_of(tmp_path, [script], open_config())
    with pytest.raises(RunError, match="has no data"):
        coordinator.train(train_request(THETA))
    assert not any(isinstance(r, GradientRequest) for r in script.asked)


def test_a_size_is_not_fixed_by_devices_that_could_not_answer(tmp_path: Path) -> None:
    """One bad moment at the start must not leave the region without data for the whole run."""
    moods: list[Callable[[Any], Any]] = [crash, lambda _: ProfileReply(100)]
    script = steady(ones(), profile=lambda r: moods.pop(0)(r) if moods else ProfileReply(100))
    coordinator = coordinator_of(tmp_path, [script], open_config())
    with pytest.raises(RunError):
        coordinator.train(train_request(THETA, 1))
    assert coordinator.train(train_request(THETA, 2)).examples == 100.0


def test_it_waits_for_its_declared_devices(tmp_path: Path) -> None:
    """A8, A9: fewer than declared is an error that names the region, not a small cohort."""
    coordinator = coordinator_of(tmp_path, [steady(ones())], tiny_config(), declared=3)
    with pytest.raises(RunError, match=r"region North: 1 of 3 declared nodes"):
        coordinator.train(train_request(THETA))
    assert ledger_of(tmp_path) == []


# -------------------------------------------------------------------------------- personalise
def test_the_residual_goes_down_and_the_next_round_starts_from_it(tmp_path: Path) -> None:
    """theta_r = -step (g_r - g), and devices are asked at theta + alpha theta_r."""
    script = steady(ones(100.0), profile=lambda _: ProfileReply(100))
    config = open_config(residual_step=2.0, rho_every=0)
    coordinator = coordinator_of(tmp_path, [script], config)
    update = coordinator.train(train_request(THETA)).update
    mean = ones(0.5)
    scores = coordinator.personalise(personalise_request(THETA + 1.0, mean))
    assert scores.strategy == "residual" and scores.rho == 1.0
    assert scores.alpha == 0.75  # a spread of 0 is the middle of the sigmoid
    expected = -2.0 * (update - mean)
    coordinator.train(train_request(THETA + 1.0, 2))
    assert torch.allclose(script.asked[-1].point, THETA + 1.0 + 0.75 * expected)
    coordinator.personalise(personalise_request(THETA, mean, 2))
    coordinator.train(train_request(THETA, 3))
    assert torch.allclose(script.asked[-1].point, THETA + 0.75 * 2.0 * expected)


@pytest.mark.parametrize(
    ("conflict", "expected"), [("sketch", 6.0), ("debiased", 4.0), ("raw", 5.0)]
)
def test_conflict_is_measured_as_configured(tmp_path: Path, conflict: str, expected: float) -> None:
    """On the sketch or on the update, with or without the noise floor."""

    def gradient(request: GradientRequest) -> GradientReply:
        total = torch.zeros(P)
        total[0] = 50.0 * 5.0
        sketch = torch.zeros(request.sketch_size)
        if request.sketch_size:
            sketch[0] = 50.0 * math.sqrt(45.0)
        return GradientReply(total, sketch, 0.0)

    script = steady(ones(), gradient=gradient, profile=lambda _: ProfileReply(100))
    coordinator = coordinator_of(tmp_path, [script], open_config(conflict=conflict))
    coordinator.train(train_request(THETA))
    request = personalise_request(
        THETA, torch.zeros(P), noise_floor=9.0, median_conflict=1.0, conflict_spread=2.0
    )
    scores = coordinator.personalise(request)
    assert scores.conflict == pytest.approx(expected, rel=1e-5)
    sigmoid = 1.0 / (1.0 + math.exp(-(scores.conflict - 1.0) / 2.0))
    assert scores.alpha == pytest.approx(0.5 + 0.5 * sigmoid)


def test_rho_is_where_the_devices_losses_are_least(tmp_path: Path) -> None:
    """All candidates in one message, along alpha times the direction; the least one wins."""

    def loss(request: LossRequest) -> LossReply:
        return LossReply([(t - 1.3) ** 2 - 1.3**2 for t in request.steps])

    scripts = [steady(ones(100.0), loss=loss), steady(ones(50.0), loss=loss)]
    config = open_config(rho_every=1, rho_evaluations=6)
    coordinator = coordinator_of(tmp_path, scripts, config)
    coordinator.train(train_request(THETA))
    scores = coordinator.personalise(personalise_request(THETA, ones(0.0)))
    asked = [r for r in scripts[0].asked if isinstance(r, LossRequest)]
    assert len(asked) == 1 and asked[0].clip_norm == VOTE_BOUND
    assert torch.equal(asked[0].base, THETA)
    assert abs(scores.rho - 1.3) <= 0.618**5 * 1.5
    # The direction was scaled by alpha already: theta + t * direction is the model to be.
    coordinator.train(train_request(THETA, 2))
    point = scripts[0].asked[-1].point
    assert torch.allclose(point, THETA + scores.rho * asked[0].direction, atol=1e-6)


def test_rho_is_zero_when_nothing_helps(tmp_path: Path) -> None:
    """And the search starts from the whole interval the next time."""
    script = steady(ones(100.0), loss=lambda r: LossReply([1.0] * len(r.steps)))
    config = open_config(rho_every=1)
    coordinator = coordinator_of(tmp_path, [script], config)
    for round_ in (1, 2):
        coordinator.train(train_request(THETA, round_))
        scores = coordinator.personalise(personalise_request(THETA, ones(0.0), round_))
        assert scores.rho == 0.0
    last = [r for r in script.asked if isinstance(r, LossRequest)][-1]
    assert 0.0 < min(last.steps) < 0.5 and 1.5 < max(last.steps) < config.rho_high
    coordinator.train(train_request(THETA, 3))
    assert torch.equal(script.asked[-1].point, THETA)


def test_votes_are_charged_and_only_in_rounds_that_search(tmp_path: Path) -> None:
    """Every n-th round, as planned."""
    config = tiny_config(rho_every=2)
    coordinator = coordinator_of(tmp_path, [steady(ones())], config)
    for round_ in (1, 2, 3):
        coordinator.train(train_request(THETA, round_))
        coordinator.personalise(personalise_request(THETA, ones(0.0), round_))
    votes = [e for e in ledger_of(tmp_path) if e["release"] == "rho vote"]
    assert [e["round"] for e in votes] == [2]
    assert votes[0]["sensitivity"] == {"vote": VOTE_BOUND}


def test_scores_are_summed_over_devices_when_it_is_time(tmp_path: Path) -> None:
    """Global and personalised models are sent; between evaluations nothing is scored."""
    scripts = [
        steady(ones(100.0), metrics=lambda _: ScoreReply([4.0, 1.0, 2.0])),
        steady(ones(0.0), metrics=lambda _: ScoreReply([6.0, 3.0, 5.0])),
    ]
    config = open_config(evaluate_every=2)
    coordinator = coordinator_of(tmp_path, scripts, config)
    coordinator.train(train_request(THETA, 1))
    quiet = coordinator.personalise(personalise_request(THETA, ones(0.0), 1))
    assert not quiet.scored and quiet.scores == [0.0] * (3 * len(TASKS))
    coordinator.train(train_request(THETA, 2))
    loud = coordinator.personalise(personalise_request(THETA, ones(0.0), 2))
    assert loud.scored and loud.scores == [10.0, 4.0, 7.0]
    asked = [r for r in scripts[0].asked if isinstance(r, ScoreRequest)]
    assert len(asked) == 1
    assert torch.equal(asked[0].theta, THETA)
    coordinator.train(train_request(THETA, 3))
    assert torch.equal(asked[0].personalised, scripts[0].asked[-1].point)


def test_devices_adapt_once_on_the_last_round(tmp_path: Path) -> None:
    """To the region's model and what the region released; nothing more is charged for it."""
    config = tiny_config(rounds=2, user_steps=3, user_lr=0.5, rho_every=0)
    scripts = [steady(ones(100.0)), steady(ones(50.0))]
    coordinator = coordinator_of(tmp_path, scripts, config)
    for round_ in (1, 2):
        update = coordinator.train(train_request(THETA, round_))
        coordinator.personalise(personalise_request(THETA, ones(0.0), round_))
    charged = ledger_of(tmp_path)
    for script in scripts:
        (asked,) = [r for r in script.asked if isinstance(r, AdaptRequest)]
        assert (asked.round, asked.steps, asked.learning_rate) == (2, 3, 0.5)
        assert (asked.clip_norm, asked.alpha_min) == (config.clip_norm, config.alpha_min)
        assert torch.equal(asked.update, update.update)
        assert asked.update_noise_std == update.update_noise_std > 0.0
        (scored,) = [r for r in script.asked if isinstance(r, ScoreRequest)]
        assert torch.equal(asked.personalised, scored.personalised) and not scored.with_user
        assert not torch.equal(asked.personalised, THETA)
    assert {e["release"] for e in charged} == {
        "region size",
        "update+loss+sketch",
        "held-out scores",
    }


def test_a_device_that_cannot_adapt_costs_nobody_else(tmp_path: Path) -> None:
    """The round goes on; a custom ClientApp need not answer."""
    config = tiny_config(rounds=1, user_steps=3)
    scripts = [steady(ones(100.0), adapt=crash), steady(ones(100.0))]
    coordinator = coordinator_of(tmp_path, scripts, config)
    coordinator.train(train_request(THETA))
    assert coordinator.personalise(personalise_request(THETA, ones(0.0))).scored


def test_a_panel_s_user_scores_are_the_fourth_column(tmp_path: Path) -> None:
    """Asked for where the settings say that the panel consented; on the last round only."""
    config = tiny_config(rounds=2, user_steps=1, user_scores="panel", evaluate_every=1)

    def answer(request: ScoreRequest) -> ScoreReply:
        return ScoreReply([10.0, 5.0, 6.0, 7.0][: 4 if request.with_user else 3])

    coordinator = coordinator_of(tmp_path, [steady(ones(), metrics=answer)] * 2, config)
    found = []
    for round_ in (1, 2):
        coordinator.train(train_request(THETA, round_))
        found.append(coordinator.personalise(personalise_request(THETA, ones(0.0), round_)).scores)
    assert found == [[20.0, 10.0, 12.0], [20.0, 10.0, 12.0, 14.0]]


def test_noised_scores_are_charged_to_the_held_out_budget(tmp_path: Path) -> None:
    """Another population: training epsilon does not move."""
    config = tiny_config(evaluation_privacy="noised", evaluate_every=1)
    script = steady(ones(), metrics=lambda _: ScoreReply([100.0, 50.0, 60.0]))
    coordinator = coordinator_of(tmp_path, [script], config)
    update = coordinator.train(train_request(THETA))
    scores = coordinator.personalise(personalise_request(THETA, ones(0.0)))
    assert scores.scores != [100.0, 50.0, 60.0]
    assert scores.epsilon == update.epsilon
    charged = ledger_of(tmp_path)[-1]
    assert charged["population"] == "held-out"
    found = epsilon(count_releases([(charged["noise_multiplier"], 1.0)]), config.delta)
    assert 0.0 < found <= config.evaluation_epsilon


def test_a_panel_is_scored_without_noise(tmp_path: Path) -> None:
    """Its members consented; the ledger says that no noise was added."""
    script = steady(ones(), metrics=lambda _: ScoreReply([10.0, 5.0, 6.0]))
    coordinator = coordinator_of(tmp_path, [script], tiny_config(evaluate_every=1))
    coordinator.train(train_request(THETA))
    scores = coordinator.personalise(personalise_request(THETA, ones(0.0)))
    assert scores.scores == [10.0, 5.0, 6.0]
    assert ledger_of(tmp_path)[-1]["noise_multiplier"] == 0.0


def test_without_personalisation_nothing_extra_is_asked_or_paid(tmp_path: Path) -> None:
    """No sketch, no votes, no direction."""
    script = steady(ones(100.0))
    config = tiny_config(rho_every=1)
    coordinator = coordinator_of(tmp_path, [script], config, personaliser=NoPersonaliser(config))
    coordinator.train(train_request(THETA))
    scores = coordinator.personalise(
        personalise_request(THETA, ones(0.0), global_sketch=torch.zeros(0))
    )
    assert scores.strategy == "none"
    coordinator.train(train_request(THETA, 2))
    assert torch.equal(script.asked[-1].point, THETA)
    assert {e["release"] for e in ledger_of(tmp_path)} == {"region size", "update+loss"}


def test_a_region_that_did_not_train_cannot_personalise(tmp_path: Path) -> None:
    """It has released nothing to personalise with."""
    coordinator = coordinator_of(tmp_path, [steady(ones())], tiny_config())
    with pytest.raises(RunError, match="took no part in round 1"):
        coordinator.personalise(personalise_request(THETA, ones(0.0)))


# ------------------------------------------------------------------------ retries and restarts
@pytest.mark.parametrize("restart", [False, True])
def test_a_retried_personalise_returns_the_same_answer_and_charges_nothing(
    tmp_path: Path, restart: bool
) -> None:
    """D10: votes and scores are not drawn again, and the residual is not added twice."""
    config = tiny_config(noise_seed=-1, rho_every=1, evaluate_every=1, evaluation_privacy="noised")
    script = steady(ones(100.0))
    first = coordinator_of(tmp_path, [script], config)
    first.train(train_request(THETA))
    before = first.personalise(personalise_request(THETA, ones(0.0)))
    charged = ledger_of(tmp_path)
    again = coordinator_of(tmp_path, [script], config) if restart else first
    after = again.personalise(personalise_request(THETA, ones(0.0)))
    assert after == before and ledger_of(tmp_path) == charged
    again.train(train_request(THETA, 2))
    expected = script.asked[-1].point
    coordinator_of(tmp_path, [script], config).train(train_request(THETA, 2))
    assert torch.equal(script.asked[-1].point, expected)


def test_a_crash_after_scoring_charges_no_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D10: the held-out budget is planned to the last release; one more would end the run."""
    config = tiny_config(noise_seed=-1, rho_every=1, evaluate_every=1, evaluation_privacy="noised")
    script = steady(ones(100.0))
    first = coordinator_of(tmp_path, [script], config)
    first.train(train_request(THETA))

    def die(folder: StateFolder, state: RegionState) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StateFolder, "save", die)
        with pytest.raises(KeyboardInterrupt):
            first.personalise(personalise_request(THETA, ones(0.0)))
    charged = ledger_of(tmp_path)
    again = coordinator_of(tmp_path, [script], config)
    again.personalise(personalise_request(THETA, ones(0.0)))
    assert ledger_of(tmp_path) == charged


def test_a_restarted_coordinator_goes_on_where_it_was(tmp_path: Path) -> None:
    """Direction, rho, alpha, size and epsilon come from its own disk."""
    config = tiny_config(rho_every=1)

    def run(folder: Path, restarts: bool) -> tuple[torch.Tensor, float]:
        script = steady(ones(100.0))
        coordinator = coordinator_of(folder, [script], config)
        for round_ in (1, 2, 3):
            if restarts:
                coordinator = coordinator_of(folder, [script], config)
            coordinator.train(train_request(THETA, round_))
            if restarts:
                coordinator = coordinator_of(folder, [script], config)
            told = coordinator.personalise(personalise_request(THETA, ones(0.1), round_)).epsilon
        coordinator.train(train_request(THETA, 4))
        return script.asked[-1].point, told

    steady_point, steady_epsilon = run(tmp_path / "steady", False)
    restarted_point, restarted_epsilon = run(tmp_path / "restarted", True)
    assert torch.equal(steady_point, restarted_point)
    assert steady_epsilon == restarted_epsilon


def test_a_server_that_goes_back_one_round_gets_the_round_again(tmp_path: Path) -> None:
    """It crashed before it saved a round that the region had finished."""
    config = tiny_config(rho_every=0)
    script = steady(ones(100.0))
    coordinator = coordinator_of(tmp_path, [script], config)
    answers = []
    for round_ in (1, 2, 2, 3):
        update = coordinator.train(train_request(THETA, round_))
        coordinator.personalise(personalise_request(THETA, ones(0.1), round_))
        answers.append(update.update)
    assert torch.equal(answers[1], answers[2])
    straight = coordinator_of(tmp_path / "straight", [other := steady(ones(100.0))], config)
    for round_ in (1, 2, 3):
        straight.train(train_request(THETA, round_))
        straight.personalise(personalise_request(THETA, ones(0.1), round_))
    coordinator.train(train_request(THETA, 4))
    straight.train(train_request(THETA, 4))
    assert torch.equal(script.asked[-1].point, other.asked[-1].point)


@pytest.mark.parametrize("crashing", ["save", "save_release"])
def test_a_crash_while_personalising_loses_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crashing: str
) -> None:
    """Whichever file was being written: after the retry the round's residual is in theta_r."""
    config = open_config(rho_every=0)
    script = steady(ones(100.0))
    coordinator = coordinator_of(tmp_path, [script], config)
    coordinator.train(train_request(THETA))

    def power_cut(*_: Any, **__: Any) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(StateFolder, crashing, power_cut)
        with pytest.raises(OSError, match="power cut"):
            coordinator.personalise(personalise_request(THETA, ones(0.0)))
    restarted = coordinator_of(tmp_path, [script], config)
    restarted.personalise(personalise_request(THETA, ones(0.0)))
    restarted.train(train_request(THETA, 2))
    uncrashed = coordinator_of(tmp_path / "uncrashed", [other := steady(ones(100.0))], config)
    uncrashed.train(train_request(THETA))
    uncrashed.personalise(personalise_request(THETA, ones(0.0)))
    uncrashed.train(train_request(THETA, 2))
    assert torch.equal(script.asked[-1].point, other.asked[-1].point)
