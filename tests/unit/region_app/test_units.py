"""The coordinator under each unit: who is asked, what is noised, what is charged."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from region_app.summation import Question, Sums
from regionfed.config import Config
from regionfed.contract import (
    DeltaRequest,
    GradientReply,
    GradientRequest,
    LossReply,
    LossRequest,
    ProfileReply,
    ProfileRequest,
    ScoreReply,
    ScoreRequest,
)
from regionfed.errors import ConfigurationError, PrivacyError, RunError
from regionfed.privacy.accountant import count_releases, epsilon
from regionfed.privacy.banded import carried, single, strategy
from regionfed.privacy.plan import LOSS_CAP, SCORE_BOUND, VOTE_BOUND, plan_privacy
from regionfed.privacy.units import UNCLIPPED, UNITS
from server_app.federation import prepare
from tests.conftest import (
    Script,
    coordinator_of,
    personalise_request,
    steady,
    tiny_config,
    train_request,
)

P = 4
THETA = torch.linspace(-1.0, 1.0, P)
LEVEL = 1e-3


def config_of(unit: str, **settings: Any) -> Config:
    return tiny_config(**{"unit": unit, "conflict": "raw", **settings})


def ledger_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def crash(_: Any) -> Any:
    raise ValueError("the device is on fire")


# ----------------------------------------------------------------------------- what is noised
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("state", ["full", "empty", "dropped out"])
def test_d2_the_noise_is_z_times_c_over_the_whole_vector(
    tmp_path: Path, unit: str, state: str
) -> None:
    """D2, D4, D5: (released - true) has std z C, once, in every unit's mode.

    Whatever the cohort, or whoever of it fails: noise is never less than accounted.
    """
    p = 20_000
    config = config_of(unit, noise_multiplier=2.0, target_epsilon=4.0, clip_norm=0.5)
    value = 0.0 if state == "empty" else 1e-5
    # A device that answers, so that regions whose devices are all asked are not refused.
    scripts = [steady(torch.full((p,), value)), steady(torch.zeros(p))]
    if state == "dropped out":
        scripts += [steady(torch.zeros(p), gradient=crash) for _ in range(3)]
    coordinator = coordinator_of(tmp_path, scripts, config)
    update = coordinator.train(train_request(torch.zeros(p)))
    plan = plan_privacy(config, sketch=False, votes=True)
    part = plan.update.part("update")
    assert part.noise_std == 2.0 * 0.5
    batch = plan.update.sampling.share * plan.unit.population(update.examples, len(scripts))
    asked = any(isinstance(r, GradientRequest | DeltaRequest) for r in scripts[0].asked)
    true = torch.full((p,), value if asked else 0.0)
    expected = part.gathered(true, batch) / part.divisor(batch)
    noise = (update.update.double() - expected) * part.divisor(batch) / part.noise_std
    noise /= single(config.rounds, plan.update.bands, 1)  # of round 1, where it is correlated
    low, high = stats.chi2.interval(1.0 - LEVEL, p)
    assert low < float(noise.square().sum()) < high
    assert stats.kstest(noise.numpy(), "norm").pvalue > LEVEL
    event = ledger_of(tmp_path)[-1]
    assert event["unit"] == UNITS[unit].protects
    assert event["noise"]["update"] == part.noise_std / event["sensitivity"]["update"]


# ------------------------------------------------------------------------------- who is asked
def test_only_clients_that_are_drawn_are_contacted(tmp_path: Path) -> None:
    """About q of them each round, others each time; all are asked for scores."""
    rounds, count, q = 40, 8, 0.25
    config = config_of("client", rounds=rounds, sampling_rate=q, evaluate_every=rounds)
    scripts = [steady(torch.zeros(P)) for _ in range(count)]
    coordinator = coordinator_of(tmp_path, scripts, config)
    for round_ in range(1, rounds + 1):
        coordinator.train(train_request(THETA, round_))
    drawn = [{r.round for r in s.asked if isinstance(r, DeltaRequest)} for s in scripts]
    low, high = stats.binom.interval(1.0 - LEVEL / count, rounds, q)
    assert all(low <= len(rounds_) <= high for rounds_ in drawn)
    assert len({frozenset(rounds_) for rounds_ in drawn}) == count
    cohorts = [sum(r in rounds_ for rounds_ in drawn) for r in range(1, rounds + 1)]
    assert len(set(cohorts)) > 1 and 0 in cohorts  # (3/4)^8 of rounds have nobody
    coordinator.personalise(personalise_request(THETA, torch.zeros(P), rounds))
    assert all(isinstance(s.asked[-1], ScoreRequest) and s.asked[-1].as_one for s in scripts)
    assert len([e for e in ledger_of(tmp_path) if e["release"] == "update+loss"]) == rounds


def test_a_restart_draws_a_cohort_anew_but_a_retry_asks_nobody(tmp_path: Path) -> None:
    """D10: what was released is said again."""
    config = config_of("client", sampling_rate=0.999)
    scripts = [steady(torch.ones(P))]
    first = coordinator_of(tmp_path, scripts, config).train(train_request(THETA))
    asked = len(scripts[0].asked)
    again = coordinator_of(tmp_path, scripts, config).train(train_request(THETA))
    assert torch.equal(first.update, again.update) and len(scripts[0].asked) == asked


def test_what_a_drawn_client_is_asked(tmp_path: Path) -> None:
    """K steps with the settings, the clip of the mechanism; each release its own cohort."""
    config = config_of(
        "client",
        sampling_rate=1.0,
        clip_norm=0.25,
        client_steps=3,
        client_lr=0.5,
        client_optimiser="sgd",
        rho_every=1,
        rounds=1,
    )
    script = steady(torch.ones(P))
    coordinator = coordinator_of(tmp_path, [script], config)
    coordinator.train(train_request(THETA))
    coordinator.personalise(personalise_request(THETA, torch.zeros(P)))
    delta, vote, score = script.asked
    assert isinstance(delta, DeltaRequest)
    assert (delta.steps, delta.learning_rate, delta.optimiser) == (3, 0.5, "sgd")
    assert (delta.clip_norm, delta.loss_cap) == (0.25, 8.0)
    assert isinstance(vote, LossRequest) and vote.as_one and vote.sampling_rate == 1.0
    assert isinstance(score, ScoreRequest) and score.as_one


@pytest.mark.parametrize("unit", ["region", "example-in-mean"])
def test_devices_clip_nothing_where_the_mean_is_clipped(tmp_path: Path, unit: str) -> None:
    """And draw their examples themselves."""
    script = steady(torch.ones(P))
    coordinator_of(tmp_path, [script], config_of(unit)).train(train_request(THETA))
    request = script.asked[-1]
    assert isinstance(request, GradientRequest)
    assert (request.clip_norm, request.sampling_rate) == (UNCLIPPED, 0.5)


# -------------------------------------------------------------------------- what does not stop it
@pytest.mark.parametrize("fails", [False, True], ids=["nobody drawn", "nobody drawn answers"])
def test_d5_whether_anybody_was_drawn_or_answered_is_not_told(tmp_path: Path, fails: bool) -> None:
    """D5, D4: zero is noised and charged; the region does not sit out."""
    config = config_of("client", sampling_rate=0.999 if fails else 0.01, noise_seed=1)
    scripts = [steady(torch.ones(P), gradient=crash) for _ in range(2)]
    coordinator = coordinator_of(tmp_path, scripts, config)
    update = coordinator.train(train_request(THETA))
    assert [len(s.asked) for s in scripts] == ([1, 1] if fails else [0, 0])
    assert bool((update.update != 0.0).all()) and update.epsilon > 0.0
    assert [e["release"] for e in ledger_of(tmp_path)] == ["update+loss"]


def test_regions_whose_devices_are_all_asked_still_sit_out(tmp_path: Path) -> None:
    """Nothing of a sample is told by that."""
    scripts = [steady(torch.ones(P), gradient=crash)]
    with pytest.raises(RunError, match="none of its devices answered"):
        coordinator_of(tmp_path, scripts, config_of("region")).train(train_request(THETA))


def test_a_small_cohort_is_divided_by_what_is_declared(tmp_path: Path) -> None:
    """Not by who was drawn, nor by how many examples they have; no size is asked for."""
    config = config_of("client", privacy_mode="none", sampling_rate=0.5)
    scripts = [steady(torch.full((P,), 0.25)) for _ in range(10)]
    coordinator = coordinator_of(tmp_path, scripts, config)
    for round_ in range(1, 5):
        update = coordinator.train(train_request(THETA, round_))
        drawn = sum(round_ == r.round for s in scripts for r in s.asked)
        assert torch.allclose(update.update, torch.full((P,), 0.25 * drawn / (0.5 * 10)))
        assert update.examples == 10 * config.examples_per_client
    assert not any(isinstance(r, ProfileRequest) for s in scripts for r in s.asked)


# --------------------------------------------------------------------------------- sensitivity
def test_a_device_that_answers_as_one_cannot_count_for_more(tmp_path: Path) -> None:
    """Its app need not be trusted with the bound of one unit: whoever sums cuts the reply."""
    config = config_of(
        "client",
        privacy_mode="none",
        sampling_rate=1.0,
        conflict="sketch",
        rounds=1,
        rho_every=1,
        personaliser="dynamic",
    )
    bold = steady(
        torch.full((P,), 1e3),
        gradient=lambda r: GradientReply(
            torch.full((P,), 1e3), torch.full((r.sketch_size,), -1e3), 1e3
        ),
        loss=lambda r: LossReply([1e3] * len(r.steps)),
        profile=lambda r: ProfileReply(10**6, [1e6, 1e6]),
    )
    coordinator = coordinator_of(tmp_path, [bold], config, labels=2)
    update = coordinator.train(train_request(THETA))
    assert float(update.update.norm()) == pytest.approx(config.clip_norm)
    assert float(update.sketch.norm()) == pytest.approx(config.clip_norm)
    assert update.loss == pytest.approx(LOSS_CAP)
    assert update.examples == pytest.approx(config.examples_per_client)
    assert math.hypot(*update.histogram) == pytest.approx(config.examples_per_client)
    state = coordinator._states.load(0)
    assert state is not None
    asked = personalise_request(THETA, update.update)
    votes = torch.tensor(coordinator._votes(asked, state, [0.5, 1.0]))
    assert float(votes.norm()) == pytest.approx(VOTE_BOUND)


def everything(folder: Path, unit: str, scripts: list[Script], **settings: Any) -> dict[str, Any]:
    """Return, without noise, all that a region would noise in a round: part to vector."""
    config = config_of(
        unit,
        privacy_mode="none",
        rounds=1,
        rho_every=1,
        sampling_rate=1.0,
        conflict="sketch",
        **settings,
    )
    coordinator = coordinator_of(folder, scripts, config)
    noised: dict[str, torch.Tensor] = {}
    mechanisms = coordinator._plan
    for name in ("update", "vote", "scores"):
        mechanism = getattr(mechanisms, name)
        assert mechanism.noise_multiplier == 0.0
    release = coordinator._sums.released

    def spy(nodes: list[int], question: Question) -> Sums:
        released = release(nodes, question)
        noised.update({k: v.clone() for k, v in released.items()})
        return released

    coordinator._sums.released = spy  # type: ignore[method-assign]
    coordinator.train(train_request(THETA))
    coordinator.personalise(personalise_request(THETA, torch.ones(P)))
    return noised


def worst(bound_by: str) -> Script:
    """Return a device at every bound that the device itself has to keep."""
    one = torch.full((P,), 0.5 / math.sqrt(P))
    if bound_by == "region":  # its devices clip nothing
        one = one * 1e9
    return Script(
        gradient=lambda r: GradientReply(
            one, torch.full((r.sketch_size,), 0.5 / math.sqrt(r.sketch_size)), 8.0
        ),
        loss=lambda r: LossReply([1.0 / math.sqrt(len(r.steps))] * len(r.steps)),
        metrics=lambda _: ScoreReply([1.0, 1.0, 1.0]),
        profile=lambda _: ProfileReply(8),
    )


@pytest.mark.parametrize("unit", ["client", "region"])
def test_adding_a_unit_changes_each_sum_by_its_bound_at_most(tmp_path: Path, unit: str) -> None:
    """By brute force: with and without one client, or with a region's data and without any."""
    silent = steady(torch.zeros(P))
    common = [silent, silent]
    without = everything(tmp_path / "without", unit, common)
    more = [*common, worst(unit)]
    with_it = everything(tmp_path / "with", unit, more)
    config = config_of(unit, conflict="sketch")
    plan = plan_privacy(config, sketch=True, votes=True)
    parts = {part.name: part for m in (plan.update, plan.vote, plan.scores) for part in m.parts}
    assert set(with_it) == set(parts)
    assert parts["scores"].bound == SCORE_BOUND
    for name, part in parts.items():
        changed = float((with_it[name] - without[name]).double().norm())
        assert changed <= part.bound * (1 + 1e-5), name
        if unit == "client" or name == "update":
            assert changed == pytest.approx(part.bound, rel=1e-4), name  # the bound is met


def test_a_region_s_scores_are_a_mean_in_the_size_that_is_declared(tmp_path: Path) -> None:
    """Panel: the ratio is the mean over its examples; the count tells nothing of theirs."""
    config = config_of("region", rounds=1, evaluate_every=1)
    script = steady(torch.ones(P), metrics=lambda _: ScoreReply([50.0, 25.0, 40.0]))
    coordinator = coordinator_of(tmp_path, [script], config)
    coordinator.train(train_request(THETA))
    scores = coordinator.personalise(personalise_request(THETA, torch.zeros(P))).scores
    declared = float(config.examples_per_client)
    assert scores == pytest.approx([declared, 0.5 * declared, 0.8 * declared])


def test_routing_counts_a_client_for_what_is_declared(tmp_path: Path) -> None:
    """Dynamic needs sizes: each device is told for how many examples it counts at most."""
    config = config_of("client", personaliser="dynamic", privacy_mode="none")
    script = steady(torch.ones(P), profile=lambda r: ProfileReply(r.most, [1.0, 2.0]))
    coordinator = coordinator_of(tmp_path, [script] * 3, config, labels=2)
    update = coordinator.train(train_request(THETA))
    asked = [r for r in script.asked if isinstance(r, ProfileRequest)]
    assert {r.most for r in asked} == {config.examples_per_client}
    assert update.examples == 3 * config.examples_per_client
    assert update.histogram == [3.0, 6.0]


# ---------------------------------------------------------------------------------- on schedule
def test_noise_on_a_schedule_is_correlated_and_charged_once_a_period(tmp_path: Path) -> None:
    """C times the noise of all rounds is independent and of std z C: what the account counts.

    A coordinator that comes back, a round that is skipped, and one that is asked for again change
    neither the noise nor the ledger.
    """
    p, rounds = 4000, 7
    config = config_of(
        "example-on-schedule",
        noise_multiplier=2.0,
        target_epsilon=4.0,
        clip_norm=0.5,
        rounds=rounds,
        sampling_rate=0.34,
        rho_every=0,
        evaluation_privacy="off",
    )
    plan = plan_privacy(config, sketch=False, votes=True)
    part, bands = plan.update.part("update"), plan.update.bands
    assert bands == 3 and plan.update.charges(rounds) == 3
    scripts = [steady(torch.zeros(p))]
    noises = []
    for round_ in (1, 2, 4, 5, 6, 7):
        coordinator = coordinator_of(tmp_path, scripts, config)
        update = coordinator.train(train_request(torch.zeros(p), round_))
        again = coordinator.train(train_request(torch.zeros(p), round_))
        assert torch.equal(update.update, again.update)
        batch = plan.update.sampling.share * update.examples
        noises.append(update.update.double() * batch / part.noise_std)
        size = float(noises[-1].square().mean().sqrt())
        assert size == pytest.approx(single(rounds, bands, round_), rel=0.1)
        assert update.update_noise_std == pytest.approx(
            part.noise_std / batch * carried(rounds, bands)
        )
    events = [e for e in ledger_of(tmp_path) if e["release"] == plan.update.release]
    assert [e["round"] for e in events] == [1, 4, 7]
    assert {(e["sampling_rate"], e["noise_multiplier"]) for e in events} == {
        (1.0, plan.update.noise_multiplier)
    }
    assert update.epsilon == pytest.approx(
        epsilon(
            count_releases(
                [(plan.size.noise_multiplier, 1.0), *[(plan.update.noise_multiplier, 1.0)] * 3]
            ),
            config.delta,
        )
    )
    # Round 3 was skipped, its row is kept by nobody: rounds 1 and 2 stand for themselves.
    c = strategy(rounds, bands)
    fresh = torch.from_numpy(c[:2, :2]) @ torch.stack(noises[:2])
    low, high = stats.chi2.interval(1.0 - LEVEL, 2 * p)
    assert low < float(fresh.square().sum()) < high
    assert abs(float(torch.corrcoef(fresh)[0, 1])) < 4.0 / math.sqrt(p)
    assert float(torch.corrcoef(torch.stack(noises[:2]))[0, 1]) < -0.2  # what leaves is correlated
    asked = [r for r in scripts[0].asked if isinstance(r, GradientRequest)]
    assert {(r.period, r.sampling_rate) for r in asked} == {(3, 1.0 / 3.0)}


def test_a_round_long_ago_is_not_noised_again(tmp_path: Path) -> None:
    """The same noise on two sums would show their difference: a world that went back is refused."""
    config = config_of("example-on-schedule", rounds=5)
    coordinator = coordinator_of(tmp_path, [steady(torch.ones(P))], config)
    for round_ in (1, 2, 3):
        coordinator.train(train_request(THETA, round_))
    with pytest.raises(PrivacyError, match="round 1 was noised long ago, and round 3 since"):
        coordinator.train(train_request(THETA, 1))


def test_what_uses_one_round_alone_is_refused_on_a_schedule() -> None:
    """Correlated noise is good for sums; neither routing nor a debiased distance is one."""
    for settings, said in (
        ({"personaliser": "grad"}, "set personaliser='residual'"),
        ({"conflict": "debiased"}, "set conflict='sketch' or 'raw'"),
        ({"secure_aggregation": "pairwise"}, "secure-aggregation"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            prepare(config_of("example-on-schedule", **settings))
