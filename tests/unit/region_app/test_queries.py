"""Gradients that a personaliser asks for, labels, and the clipped mean: released as all else is."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from region_app.coordinator import Coordinator
from region_app.state import StateFolder
from regionfed.config import Config
from regionfed.contract import (
    GradientReply,
    GradientRequest,
    LossReply,
    LossRequest,
    ProfileReply,
    ProfileRequest,
)
from regionfed.errors import PrivacyError, RunError
from regionfed.privacy.plan import plan_privacy
from regionfed.privacy.units import UNCLIPPED
from tests.conftest import (
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


def ledger_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def queries_of(script: Script) -> list[GradientRequest]:
    return [r for r in script.asked if isinstance(r, GradientRequest) and r.query]


def one_round(coordinator: Coordinator, theta: torch.Tensor, round_: int, **facts: Any) -> Any:
    coordinator.train(train_request(theta, round_))
    mean = torch.zeros_like(theta)
    return coordinator.personalise(personalise_request(theta, mean, round_, **facts))


def leaning() -> Script:
    """Return a device whose gradient is the point it is asked at, summed over 500 examples."""
    return Script(
        gradient=lambda r: GradientReply(500.0 * r.point, torch.zeros(r.sketch_size), 0.0),
        loss=lambda r: LossReply([0.0] * len(r.steps)),
        profile=lambda r: ProfileReply(1000, [600.0, 400.0][: r.labels]),
    )


# -------------------------------------------------------------------------------- extra gradients
def test_a_query_is_the_mean_gradient_at_the_point_asked_for(tmp_path: Path) -> None:
    """Interp's two steps without noise: each from where the last one led."""
    script = leaning()
    config = tiny_config(
        privacy_mode="none", personaliser="interp", local_steps=2, personal_step=0.5, rho_every=1
    )
    coordinator = coordinator_of(tmp_path, [script], config)
    one_round(coordinator, THETA, 1)
    first, second = queries_of(script)
    assert torch.equal(first.point, THETA)
    assert torch.allclose(second.point, 0.5 * THETA)
    assert (first.query, second.query, first.sketch_size) == (1, 2, 0)
    (vote,) = [r for r in script.asked if isinstance(r, LossRequest)]
    assert torch.allclose(vote.direction, 0.75 * -0.75 * THETA)  # alpha times the way walked


def test_devices_learn_at_theta_where_theta_r_is_built_anew(tmp_path: Path) -> None:
    """Only what accumulates is part of the point that updates are taken at."""
    script = leaning()
    config = tiny_config(privacy_mode="none", personaliser="interp", rho_every=1)
    coordinator = coordinator_of(tmp_path, [script], config)
    one_round(coordinator, THETA, 1)
    coordinator.train(train_request(THETA, 2))
    assert torch.equal(script.asked[-1].point, THETA)


def test_meta_of_second_order_passes_its_step_on(tmp_path: Path) -> None:
    """The devices are the ones that differentiate through it."""
    script = leaning()
    config = tiny_config(
        privacy_mode="none", personaliser="meta", meta_order=2, inner_step=0.25, rho_every=1
    )
    one_round(coordinator_of(tmp_path, [script], config), THETA, 1)
    (query,) = queries_of(script)
    assert query.inner_step == 0.25 and torch.equal(query.point, THETA)
    assert all(r.inner_step == 0.0 for r in script.asked if getattr(r, "query", 1) == 0)


@pytest.mark.parametrize(("name", "each"), [("grad", 0), ("meta", 1), ("interp", 3)])
def test_queries_are_charged_one_by_one_and_only_in_rounds_that_need_theta_r(
    tmp_path: Path, name: str, each: int
) -> None:
    """Rounds that search, evaluate, or end the run; all of it fits the plan's budget."""
    config = tiny_config(rounds=6, rho_every=4, evaluate_every=3, personaliser=name, local_steps=3)
    coordinator = coordinator_of(tmp_path, [leaning()], config)
    for round_ in range(1, 7):
        scores = one_round(coordinator, THETA, round_)
        assert scores.strategy == (name if round_ >= 3 else "")
    charged = [e["round"] for e in ledger_of(tmp_path) if e["release"] == "personal gradient"]
    assert charged == [r for r in (3, 4, 6) for _ in range(each)]
    assert 0.95 * config.target_epsilon < scores.epsilon <= config.target_epsilon
    if each:
        event = next(e for e in ledger_of(tmp_path) if e["release"] == "personal gradient")
        assert event["sensitivity"] == {"gradient": config.clip_norm}
        assert event["sampling_rate"] == config.sampling_rate


def test_more_queries_than_declared_are_refused(tmp_path: Path) -> None:
    """A personaliser that asks for more than it states is stopped before anything is released."""

    class Greedy:
        measures_conflict = searches_rho = accumulates = True
        compares_labels = False
        queries = 0

        def propose(self, released: Any, query: Any) -> Any:
            for _ in range(3):
                query(released.theta)

    config = tiny_config(rounds=1, rho_every=0)
    coordinator = coordinator_of(tmp_path, [leaning()], config, personaliser=Greedy())
    with pytest.raises(PrivacyError, match="more gradients than the 0"):
        one_round(coordinator, THETA, 1)
    assert "personal gradient" not in {e["release"] for e in ledger_of(tmp_path)}


def test_each_query_has_noise_of_its_own_of_the_planned_size(tmp_path: Path) -> None:
    """Chi-square on what is left of a direction when devices answer zero."""
    p = 20_000
    config = tiny_config(personaliser="interp", local_steps=2, personal_step=1.0, rho_every=1)
    coordinator = coordinator_of(tmp_path, [steady(torch.zeros(p))], config)
    one_round(coordinator, torch.zeros(p), 1)
    plan = plan_privacy(config, sketch=True, votes=True, anew=True, queries=2)
    draws = [StateFolder(tmp_path).load_release(f"query-{i}", 1) for i in (1, 2)]
    state = StateFolder(tmp_path).load(1)
    assert state is not None
    batch = config.sampling_rate * state.examples
    noises = [d[0]["gradient"].double() * batch / plan.query.parts[0].noise_std for d in draws if d]
    low, high = stats.chi2.interval(1.0 - LEVEL, p)
    assert len(noises) == 2
    for noise in noises:
        assert low < float(noise.square().sum()) < high
    assert abs(float(torch.corrcoef(torch.stack(noises))[0, 1])) < 5.0 / math.sqrt(p)


def test_a_retry_gets_the_same_gradients_and_votes_and_charges_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D10: a crash after the queries, a restart, and devices that would now answer differently."""
    config = tiny_config(personaliser="interp", rho_every=1, noise_seed=-1)
    coordinator = coordinator_of(tmp_path, [leaning()], config)
    coordinator.train(train_request(THETA))
    request = personalise_request(THETA, torch.zeros(P))

    def power_cut(*_: Any, **__: Any) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(StateFolder, "save", power_cut)
        with pytest.raises(OSError, match="power cut"):
            coordinator.personalise(request)
    charged = ledger_of(tmp_path)
    assert [e["release"] for e in charged][-3:] == ["personal gradient"] * 2 + ["rho vote"]
    kept = StateFolder(tmp_path).load_release("query-2", 1)
    changed = steady(torch.full((P,), 99.0))
    coordinator_of(tmp_path, [changed], config).personalise(request)
    assert ledger_of(tmp_path) == charged
    assert not queries_of(changed)
    again = StateFolder(tmp_path).load_release("query-2", 1)
    assert kept is not None and again is not None
    assert torch.equal(kept[0]["gradient"], again[0]["gradient"])


def test_a_query_is_charged_before_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D9: ledger, noise, save, return."""
    config = tiny_config(personaliser="meta", rho_every=1)
    coordinator = coordinator_of(tmp_path, [leaning()], config)
    coordinator.train(train_request(THETA))

    def power_cut(self: StateFolder, name: str, *_: Any) -> None:
        assert name == "query-1" and ledger_of(tmp_path)[-1]["release"] == "personal gradient"
        raise OSError("power cut")

    monkeypatch.setattr(StateFolder, "save_release", power_cut)
    with pytest.raises(OSError, match="power cut"):
        coordinator.personalise(personalise_request(THETA, torch.zeros(P)))


def test_no_answer_to_a_query_is_no_gradient(tmp_path: Path) -> None:
    """The round fails for the region; nothing is charged for it."""

    def moody(request: GradientRequest) -> GradientReply:
        if request.query:
            raise ValueError("out of battery")
        return GradientReply(torch.ones(P), torch.zeros(request.sketch_size), 0.0)

    config = tiny_config(personaliser="meta", rho_every=1)
    coordinator = coordinator_of(tmp_path, [steady(torch.ones(P), gradient=moody)], config)
    with pytest.raises(RunError, match="none of its devices answered"):
        one_round(coordinator, THETA, 1)
    assert "personal gradient" not in {e["release"] for e in ledger_of(tmp_path)}


# ----------------------------------------------------------------------------------------- labels
def test_labels_are_released_once_with_the_size_as_one_mechanism(tmp_path: Path) -> None:
    """Charged once at z / sqrt(2), kept over a restart, and sent with each update."""
    script = leaning()
    config = tiny_config(personaliser="dynamic", size_noise_multiplier=20.0)
    coordinator = coordinator_of(tmp_path, [script], config, labels=2)
    first = coordinator.train(train_request(THETA, 1))
    again = coordinator_of(tmp_path, [script], config, labels=2).train(train_request(THETA, 2))
    assert first.histogram == again.histogram != [600.0, 400.0]
    assert all(abs(a - b) < 100.0 for a, b in zip(first.histogram, (600.0, 400.0), strict=True))
    profiles = [r for r in script.asked if isinstance(r, ProfileRequest)]
    assert [r.labels for r in profiles] == [2]
    (event,) = [e for e in ledger_of(tmp_path) if e["round"] == 0]
    assert event["release"] == "region size and labels"
    assert event["noise_multiplier"] == pytest.approx(20.0 / math.sqrt(2.0))
    assert event["sensitivity"] == {"size": 1.0, "labels": 1.0}


def test_labels_are_not_asked_for_where_nobody_compares_them(tmp_path: Path) -> None:
    """Then they are not paid for."""
    script = leaning()
    update = coordinator_of(tmp_path, [script], tiny_config(), labels=0).train(train_request(THETA))
    assert script.asked[0].labels == 0 and update.histogram == []


def test_a_device_with_another_number_of_labels_is_quarantined(tmp_path: Path) -> None:
    """A5: it costs itself only."""
    odd = steady(torch.ones(P), profile=lambda _: ProfileReply(1000, [1.0, 2.0, 3.0]))
    config = tiny_config(personaliser="dynamic", privacy_mode="none")
    update = coordinator_of(tmp_path, [leaning(), odd], config, labels=2).train(
        train_request(THETA)
    )
    assert update.histogram == [600.0, 400.0] and update.examples == 1000.0


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"median_conflict": -1.0, "global_histogram": [100.0, 900.0]}, "meta"),
        ({"median_conflict": -1.0, "global_histogram": [600.0, 400.0]}, "grad"),
        ({"mean_examples": 500.0, "global_histogram": [600.0, 400.0]}, "interp"),
    ],
)
def test_a_region_goes_the_way_that_fits_it(
    tmp_path: Path, facts: dict[str, Any], name: str
) -> None:
    """From its own releases and what the world sent; twice the same."""
    config = tiny_config(personaliser="dynamic", privacy_mode="none", rho_every=1)
    facts = {"mean_examples": 1000.0, **facts}
    answers = [
        one_round(
            coordinator_of(tmp_path / str(i), [leaning()], config, labels=2), THETA, 1, **facts
        )
        for i in range(2)
    ]
    assert answers[0] == answers[1]
    assert answers[0].strategy == name
    assert ("not meta" in answers[0].reason) == (name != "meta")


# ------------------------------------------------------------------------------ the clipped mean
def mean_config(**settings: Any) -> Config:
    return tiny_config(unit="example-in-mean", conflict="raw", **settings)


@pytest.mark.parametrize(("scale", "norm"), [(0.001, None), (10.0, 0.5)])
def test_the_mean_is_clipped_once_and_devices_clip_nothing(
    tmp_path: Path, scale: float, norm: float | None
) -> None:
    """clip(sum / expected batch, C), whole where it is short."""
    script = steady(torch.full((P,), 500.0 * scale))
    config = mean_config(privacy_mode="none")
    update = coordinator_of(tmp_path, [script], config).train(train_request(THETA)).update
    assert script.asked[-1].clip_norm == UNCLIPPED
    expected = torch.full((P,), scale)
    assert torch.allclose(update, expected if norm is None else expected * norm / expected.norm())


def test_the_noise_is_on_the_mean_and_one_example_is_charged_for_twice_the_clip(
    tmp_path: Path,
) -> None:
    """std sigma C, whatever the size of the region; sensitivity 2 C."""
    p, sigma = 20_000, 4.0
    config = mean_config(noise_multiplier=sigma, target_epsilon=4.0)
    update = coordinator_of(tmp_path, [steady(torch.zeros(p))], config).train(
        train_request(torch.zeros(p))
    )
    assert update.update_noise_std == pytest.approx(sigma * config.clip_norm)
    low, high = stats.chi2.interval(1.0 - LEVEL, p)
    assert low < float((update.update.double() / update.update_noise_std).square().sum()) < high
    assert ledger_of(tmp_path)[-1]["sensitivity"]["update"] == 2.0 * config.clip_norm


def test_one_example_moves_the_clipped_mean_by_twice_the_clip_at_most(tmp_path: Path) -> None:
    """And it can: that is why epsilon counts 2 C."""
    config = mean_config(privacy_mode="none")
    ends = []
    for i, total in enumerate((1e9, -1e9)):
        script = steady(torch.full((P,), total))
        update = coordinator_of(tmp_path / str(i), [script], config).train(train_request(THETA))
        ends.append(update.update)
    assert float((ends[0] - ends[1]).norm()) == pytest.approx(2.0 * config.clip_norm)


# --------------------------------------------------------------------------- what rho has cost
@pytest.mark.parametrize(("search", "points"), [("warm", 8), ("published", 8)])
def test_the_searches_for_rho_are_counted(tmp_path: Path, search: str, points: int) -> None:
    """All points of a search in one message to each device; kept over a restart."""
    config = tiny_config(rho_every=2, rho_evaluations=4, rho_search=search)
    scripts = [leaning(), leaning(), leaning()]
    for round_ in (1, 2, 3, 4):
        scores = one_round(coordinator_of(tmp_path, scripts, config), THETA, round_)
        searches = round_ // 2
        assert scores.rho_evaluations == points * searches
        assert scores.rho_messages == len(scripts) * searches


def test_the_published_search_ends_at_its_lower_end_where_nothing_helps(tmp_path: Path) -> None:
    """0.618^7, the least point that seven evaluations of [0, 1] visit; it knows no 0."""
    rising = steady(torch.ones(P), loss=lambda r: LossReply([float(t) for t in r.steps]))
    settings = {"privacy_mode": "none", "rho_every": 1, "rho_high": 1.0, "rho_evaluations": 7}
    pinned = coordinator_of(
        tmp_path / "p", [rising], tiny_config(rho_search="published", **settings)
    )
    for round_ in (1, 2):
        assert one_round(pinned, THETA, round_).rho == pytest.approx(0.0344, abs=1e-4)
    ours = coordinator_of(tmp_path / "w", [rising], tiny_config(**settings))
    assert one_round(ours, THETA, 1).rho == 0.0
