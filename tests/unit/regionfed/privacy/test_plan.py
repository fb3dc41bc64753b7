"""The plan: least noise, whole run in budget, nothing left out."""

import math
from dataclasses import replace
from typing import Any

import pytest

from regionfed.config import Config
from regionfed.errors import ConfigurationError, PrivacyError
from regionfed.privacy.accountant import count_releases, epsilon
from regionfed.privacy.ledger import Ledger
from regionfed.privacy.plan import (
    HELD_OUT,
    LOSS_CAP,
    TRAIN,
    PrivacyPlan,
    evaluates,
    personalises,
    plan_privacy,
    predicted_noise,
    region_epsilon,
    searches_rho,
)
from tests.conftest import tiny_config


def config_of(**settings: Any) -> Config:
    return tiny_config(**{"rounds": 6, "rho_every": 3, "evaluation_privacy": "noised", **settings})


def spent(plan: PrivacyPlan, config: Config, *, votes: bool = True) -> dict[str, float]:
    """Return what a whole run costs, counted release by release."""
    releases: dict[str, list[tuple[float, float]]] = {TRAIN: [], HELD_OUT: []}
    used = [plan.size]
    for round_ in range(1, config.rounds + 1):
        used.append(plan.update)
        if votes and searches_rho(config, round_, anew=plan.anew):
            used.append(plan.vote)
        if personalises(config, round_):
            used += [plan.query] * plan.queries
        if evaluates(config, round_):
            used.append(plan.scores)
    for mechanism in used:
        one = (mechanism.noise_multiplier, mechanism.sampling_rate)
        releases[mechanism.population].append(one)
    return {p: epsilon(count_releases(r), config.delta) for p, r in releases.items()}


@pytest.mark.parametrize("target", [0.5, 1.0, 4.0, 8.0, 20.0])
@pytest.mark.parametrize(("sketch", "votes"), [(True, True), (False, False)])
def test_a_run_spends_its_target_and_no_more(target: float, sketch: bool, votes: bool) -> None:
    """Between 0.98 of the target and the target, counted independently."""
    config = config_of(target_epsilon=target, size_noise_multiplier=50.0)
    plan = plan_privacy(config, sketch=sketch, votes=votes)
    total = spent(plan, config, votes=votes)[TRAIN]
    assert 0.98 * target <= total <= target


@pytest.mark.parametrize("target", [0.5, 4.0])
def test_held_out_scores_spend_their_own_target(target: float) -> None:
    """An evaluation budget of its own, met from below."""
    config = config_of(evaluation_epsilon=target, evaluate_every=2)
    plan = plan_privacy(config, sketch=True, votes=True)
    assert 0.98 * target <= spent(plan, config)[HELD_OUT] <= target


def test_the_ledger_accepts_the_whole_plan_and_not_one_release_more(tmp_path: Any) -> None:
    """Plan and ledger count alike: the last planned release passes, the next one does not."""
    config = config_of()
    plan = plan_privacy(config, sketch=True, votes=True)
    ledger = Ledger(tmp_path / "ledger.jsonl", config.delta, plan.budgets)
    ledger.charge(plan.size.event("North", 0))
    for round_ in range(1, config.rounds + 1):
        ledger.charge(plan.update.event("North", round_))
        if searches_rho(config, round_, anew=False):
            ledger.charge(plan.vote.event("North", round_))
        if evaluates(config, round_):
            ledger.charge(plan.scores.event("North", round_))
    with pytest.raises(PrivacyError):
        ledger.charge(plan.update.event("North", config.rounds + 1))


def test_the_parts_are_bounded_by_what_devices_clip_to() -> None:
    """Sensitivities are the clip bounds; loss and sketch are noised by their own multiplier."""
    config = config_of(clip_norm=0.3, auxiliary_noise_ratio=5.0)
    plan = plan_privacy(config, sketch=True, votes=True)
    parts = {part.name: part for part in plan.update.parts}
    assert {n: p.bound for n, p in parts.items()} == {
        "update": 0.3,
        "loss": LOSS_CAP,
        "sketch": 0.3,
    }
    z = parts["update"].noise_multiplier
    assert parts["loss"].noise_multiplier == parts["sketch"].noise_multiplier == 5.0 * z
    assert plan.vote.parts[0].noise_multiplier == 5.0 * z
    assert plan.update.sampling_rate == plan.vote.sampling_rate == config.sampling_rate
    assert plan.size.sampling_rate == plan.scores.sampling_rate == 1.0
    assert plan.scores.parts[0].bound == math.sqrt(3.0)


def test_what_is_not_used_is_not_paid_for() -> None:
    """Without sketch and votes the update needs less noise."""
    config = config_of(auxiliary_noise_ratio=1.0)
    lean = plan_privacy(config, sketch=False, votes=False).update
    full = plan_privacy(config, sketch=True, votes=True).update
    assert "sketch" not in {p.name for p in lean.parts}
    assert lean.parts[0].noise_multiplier < full.parts[0].noise_multiplier


def test_privacy_switched_off_is_no_noise_and_no_promise() -> None:
    """Multipliers 0, budgets infinite."""
    plan = plan_privacy(config_of(privacy_mode="none"), sketch=True, votes=True)
    for mechanism in (plan.update, plan.vote, plan.size, plan.scores):
        assert mechanism.noise_multiplier == 0.0
    assert plan.budgets == {TRAIN: math.inf, HELD_OUT: math.inf}


def test_a_consenting_panel_is_scored_without_noise_and_without_a_promise() -> None:
    """Only held-out scores are affected."""
    plan = plan_privacy(config_of(evaluation_privacy="panel"), sketch=True, votes=True)
    assert plan.scores.noise_multiplier == 0.0 and plan.budgets[HELD_OUT] == math.inf
    assert plan.update.noise_multiplier > 0.0 and plan.budgets[TRAIN] == 8.0


def test_a_target_that_no_noise_reaches_is_refused_with_a_remedy() -> None:
    """The region's size alone would cost more."""
    config = config_of(target_epsilon=0.01, size_noise_multiplier=1.0)
    with pytest.raises(PrivacyError, match=r"target-epsilon=0\.01.*size-noise-multiplier"):
        plan_privacy(config, sketch=True, votes=True)


def test_rounds_that_search_and_evaluate() -> None:
    """Every n-th round; the last is always evaluated; 0 and 'off' are never."""
    config = config_of(rounds=7, rho_every=3, evaluate_every=3)
    rounds = range(1, 8)
    assert [r for r in rounds if searches_rho(config, r, anew=False)] == [3, 6]
    assert [r for r in rounds if evaluates(config, r)] == [3, 6, 7]
    never = replace(config, rho_every=0, evaluation_privacy="off")
    assert not any(searches_rho(never, r, anew=False) or evaluates(never, r) for r in rounds)


# -------------------------------------------------------------------------------- extra gradients
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("labels", [0, 8])
def test_extra_gradients_and_labels_are_planned_for(queries: int, labels: int) -> None:
    """The whole run spends its target; the noise on an update is what pays."""
    config = config_of(size_noise_multiplier=50.0)
    plan = plan_privacy(config, sketch=True, votes=True, anew=True, queries=queries, labels=labels)
    assert 0.98 * config.target_epsilon <= spent(plan, config)[TRAIN] <= config.target_epsilon
    bare = plan_privacy(config, sketch=True, votes=True)
    assert plan.update.noise_multiplier > bare.update.noise_multiplier
    assert plan.query.noise_multiplier == plan.update.parts[0].noise_multiplier
    parts = {part.name for part in plan.size.parts}
    assert parts == ({"size", "labels"} if labels else {"size"})
    assert (plan.queries, plan.labels) == (queries, labels)


def test_theta_r_is_needed_where_rho_is_searched_at_evaluations_and_at_the_end() -> None:
    """The last round too where nothing is evaluated."""
    config = config_of(rounds=10, rho_every=4, evaluate_every=3)
    assert [r for r in range(1, 11) if personalises(config, r)] == [3, 4, 6, 8, 9, 10]
    silent = replace(config, rho_every=0, evaluation_privacy="off")
    assert [r for r in range(1, 11) if personalises(silent, r)] == [10]


def test_rho_is_searched_for_wherever_theta_r_is_built_anew() -> None:
    """The last rho says nothing about another direction; each search is planned."""
    config = config_of(rounds=10, rho_every=4, evaluate_every=3, size_noise_multiplier=50.0)
    rounds = range(1, 11)
    assert [r for r in rounds if searches_rho(config, r, anew=True)] == [3, 4, 6, 8, 9, 10]
    assert not any(searches_rho(replace(config, rho_every=0), r, anew=True) for r in rounds)
    plan = plan_privacy(config, sketch=True, votes=True, anew=True)
    assert spent(plan, config)[TRAIN] <= config.target_epsilon


def test_gradients_in_every_round_are_refused() -> None:
    """They would be paid for in every round."""
    with pytest.raises(ConfigurationError, match="accumulates and asks for 2"):
        plan_privacy(config_of(), sketch=True, votes=True, queries=2)


# -------------------------------------------------------------------------- noise that is set
def published(**settings: Any) -> Config:
    base = {"profile": "paper", "size-noise-multiplier": 1e4, "auxiliary-noise-ratio": 1e3}
    return Config.from_run_config({**base, "evaluation-privacy": "panel", **settings})


def test_noise_that_is_set_is_used_and_epsilon_follows() -> None:
    """The budget is what the run will really spend, whatever the target says."""
    config = config_of(noise_multiplier=2.0, target_epsilon=4.0)
    plan = plan_privacy(config, sketch=True, votes=True, anew=True, queries=1)
    assert plan.update.parts[0].noise_std == 2.0 * config.clip_norm
    assert plan.budgets[TRAIN] == spent(plan, config)[TRAIN]


def test_the_published_settings_have_the_epsilons_that_they_have() -> None:
    """q = 0.1, T = 50, sigma = 4: 1.65 per example, 8.6 and 20.7 per region; not 0.60.

    0.684 is what the same noise gives to whom is clipped by himself.
    """
    config = published()
    plan = plan_privacy(config, sketch=False, votes=False)
    assert plan.update.parts[0].bound == 2.0 and plan.update.parts[0].noise_std == 4.0
    assert plan.budgets[TRAIN] == pytest.approx(1.65, abs=0.01)
    region = region_epsilon(config, plan, config.rounds)
    assert region.emptied == pytest.approx(8.6, abs=0.01)
    assert region.replaced == pytest.approx(20.68, abs=0.01)
    own = replace(config, unit="example")
    budgets = plan_privacy(own, sketch=False, votes=False).budgets
    assert budgets[TRAIN] == pytest.approx(0.684, abs=0.002)


def test_extra_gradients_count_for_the_region_too() -> None:
    """Every gradient is one more look at the same region."""
    config = published()
    bare, more = (
        plan_privacy(config, sketch=False, votes=False, anew=True, queries=q) for q in (0, 1)
    )
    assert region_epsilon(config, more, 50).emptied > region_epsilon(config, bare, 50).emptied


def test_the_noise_on_each_weight_is_foreseen() -> None:
    """s tau sqrt(T / R) before any cut; the clipped mean is not divided by a batch."""
    config = published()
    plan = plan_privacy(config, sketch=False, votes=False)
    found = predicted_noise(config, plan, regions=8, examples=6000.0)
    assert found == pytest.approx(1.0 * 4.0 * math.sqrt(50 / 8))
    ours = config_of(
        noise_multiplier=1.0, target_epsilon=4.0, server_lr=2.0, noise_limit=1.0, rounds=9
    )
    plan = plan_privacy(ours, sketch=True, votes=True)
    expected = 2.0 * (ours.clip_norm / (ours.sampling_rate * 100.0)) * 3.0
    found = predicted_noise(ours, plan, regions=1, examples=100.0)
    assert found == pytest.approx(expected)
    found = predicted_noise(ours, plan, regions=1, examples=100.0, excess=1.25)
    assert found == pytest.approx(1.25 * expected)
