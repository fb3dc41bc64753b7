"""Field cases D1, D5, D9 and D10: privacy that a restart, a retry or a nan cannot undo."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from client_app.app import app as client_app
from client_app.app import workbench
from regionfed.config import Config, key_of
from regionfed.contract import (
    GradientReply,
    GradientRequest,
    LossReply,
    LossRequest,
    RegionScores,
    RegionUpdate,
    decode,
    encode,
    message_type,
)
from regionfed.errors import ConfigurationError, PrivacyError
from server_app.in_process_grid import InProcessGrid, Node
from tests.conftest import (
    RUN_ID,
    context_of,
    coordinator_of,
    part,
    personalise_request,
    steady,
    tiny_config,
    train_request,
)

P = 5
THETA = torch.linspace(-1.0, 1.0, P)
LEVEL = 1e-3
FLOATS = {key_of(f) for f in fields(Config) if isinstance(f.default, float)}


def ledger_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


# ----------------------------------------------------------------------------------------- D1
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 0.0, -1.0])
@pytest.mark.parametrize(
    "key",
    [
        "clip-norm",
        "size-noise-multiplier",
        "auxiliary-noise-ratio",
        "delta",
        "sampling-rate",
        "target-epsilon",
        "evaluation-epsilon",
    ],
)
def test_d1_no_privacy_setting_is_nan_infinite_zero_or_negative(key: str, value: float) -> None:
    """D1.

    nan, inf, -0.0, negative for clip norm, noise multiplier, delta, q (nan passes `x <= 0`). ->
    every float in the configuration is checked with isfinite and a range, naming the key.
    """
    with pytest.raises(ConfigurationError, match=f"^{key}={value!r}: must be a finite number"):
        Config.from_run_config({key: value})


@pytest.mark.parametrize("key", sorted(FLOATS))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_d1_no_float_at_all_is_nan_or_infinite(key: str, value: float) -> None:
    """D1.

    -> every float in the configuration, not only those of privacy.
    """
    with pytest.raises(ConfigurationError, match=f"^{key}="):
        Config.from_run_config({key: value})


# ----------------------------------------------------------------------------------------- D5
def asked(config: Config, request: GradientRequest | LossRequest) -> Any:
    """Return a real device's reply to a request."""
    context = context_of(1, {"region": "UK", "partition-id": 0}, config)
    region = workbench(config).dataset.regions[0]
    context.node_config["region"] = region
    grid = InProcessGrid({1: Node(client_app, context)}, RUN_ID)
    from flwr.app import Message

    message = Message(encode(request), dst_node_id=1, message_type=message_type(request))
    (reply,) = grid.send_and_receive([message])
    assert not reply.has_error(), reply.error.reason
    return reply.content


def test_d5_an_empty_sample_of_a_device_is_zero(t5_folder: Path) -> None:
    """D5.

    An empty Poisson cohort or batch (still crashes Opacus' loader on dict data). -> contributes
    zero.
    """
    config = tiny_config(model=str(t5_folder))
    layout = workbench(config).layout
    gradient = GradientRequest(
        round=1,
        layout=layout.fingerprint,
        sampling_rate=1e-12,
        clip_norm=1.0,
        loss_cap=8.0,
        sketch_seed=0,
        sketch_size=8,
        point=torch.zeros(layout.size),
    )
    reply = decode(GradientReply, asked(config, gradient), {"p": layout.size, "k": 8})
    assert not bool(reply.total.any()) and not bool(reply.sketch.any()) and reply.loss == 0.0
    loss = LossRequest(
        round=1,
        layout=layout.fingerprint,
        sampling_rate=1e-12,
        clip_norm=1.0,
        steps=[0.5, 1.0],
        base=torch.zeros(layout.size),
        direction=torch.ones(layout.size),
    )
    assert decode(LossReply, asked(config, loss), {"steps": 2}).differences == [0.0, 0.0]


def test_d5_an_empty_cohort_is_noised_and_accounted_like_any_other(tmp_path: Path) -> None:
    """D5.

    -> contributes zero, noise is still added, the event is still accounted.
    """
    p, config = 10_000, tiny_config()
    updates = {}
    for name, total in (("empty", torch.zeros(p)), ("full", torch.full((p,), 0.01))):
        coordinator = coordinator_of(tmp_path / name, [steady(total)], config)
        updates[name] = coordinator.train(train_request(torch.zeros(p)))
    empty = updates["empty"]
    low, high = stats.chi2.interval(1.0 - LEVEL, p)
    assert low < float((empty.update.double() / empty.update_noise_std).square().sum()) < high
    assert empty.loss != 0.0 and bool((empty.sketch != 0.0).all())
    assert empty.epsilon == updates["full"].epsilon > 0.0
    assert ledger_of(tmp_path / "empty") == ledger_of(tmp_path / "full")


# ----------------------------------------------------------------------------------------- D9
def test_d9_epsilon_goes_on_after_a_restart(tmp_path: Path) -> None:
    """D9.

    Epsilon restarts from zero after a restart or resume. -> the ledger is durable and is written
    before the release it describes leaves.
    """
    config = tiny_config()
    spent = []
    for round_ in range(1, 5):
        coordinator = coordinator_of(tmp_path, [steady(torch.ones(P))], config)  # a new process
        spent.append(coordinator.train(train_request(THETA, round_)).epsilon)
        coordinator.personalise(personalise_request(THETA, torch.zeros(P), round_))
    assert spent == sorted(spent) and len(set(spent)) == 4
    assert 0.9 * config.target_epsilon < spent[-1] <= config.target_epsilon


def test_d9_the_ledger_knows_of_a_release_before_the_world_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D9.

    -> written before the release it describes leaves: a ledger that cannot be written stops the
    release.
    """
    from regionfed.privacy import ledger

    coordinator = coordinator_of(tmp_path, [steady(torch.ones(P))], tiny_config())
    coordinator.train(train_request(THETA))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ledger, "append_line", full)
    with pytest.raises(OSError, match="No space"):
        coordinator.train(train_request(THETA, 2))
    monkeypatch.undo()
    assert [e["round"] for e in ledger_of(tmp_path)] == [0, 1]


@pytest.mark.parametrize("kept", [0, 1])
def test_d9_a_ledger_that_is_older_than_the_state_stops_the_region(
    tmp_path: Path, kept: int
) -> None:
    """D9.

    Epsilon restarts from zero after a restart -> a ledger that was lost, or put back, is noticed.
    """
    coordinator = coordinator_of(tmp_path, [steady(torch.ones(P))], tiny_config())
    coordinator.train(train_request(THETA))
    coordinator.personalise(personalise_request(THETA, torch.zeros(P)))
    ledger = tmp_path / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:kept]))
    with pytest.raises(PrivacyError, match=r"state is of round 1, the ledger ends at.*Restore"):
        coordinator_of(tmp_path, [steady(torch.ones(P))], tiny_config())
    ledger.write_text("".join(lines))
    coordinator_of(tmp_path, [steady(torch.ones(P))], tiny_config())


# ---------------------------------------------------------------------------------------- D10
def bytes_of(message: RegionUpdate | RegionScores) -> dict[str, Any]:
    """Return a message as it crosses: array bytes, metrics and settings."""
    records = encode(message)
    arrays = {k: a.data for k, a in part(records, "arrays").items()} if "arrays" in records else {}
    return {**arrays, **part(records, "metrics"), **part(records, "config")}


@pytest.mark.parametrize("restart", [False, True], ids=["same process", "restarted"])
@pytest.mark.parametrize("noise_seed", [-1, 0], ids=["secure noise", "seeded noise"])
def test_d10_a_retried_round_returns_the_same_bytes_and_charges_nothing_more(
    tmp_path: Path, restart: bool, noise_seed: int
) -> None:
    """D10.

    A retried message draws fresh noise for the same round (two releases accounted as one). ->
    replies are idempotent by round: a retry returns the very same bytes.
    """
    config = tiny_config(
        noise_seed=noise_seed, rho_every=1, evaluate_every=1, evaluation_privacy="noised"
    )
    script = steady(torch.ones(P))
    coordinator = coordinator_of(tmp_path, [script], config)
    train, personalise = train_request(THETA), personalise_request(THETA, torch.zeros(P))
    update = bytes_of(coordinator.train(train))
    assert bytes_of(coordinator.train(train)) == update
    scores = bytes_of(coordinator.personalise(personalise))
    charged, questions = ledger_of(tmp_path), len(script.asked)
    for _ in range(2):
        if restart:
            coordinator = coordinator_of(tmp_path, [script], config)
        # After the second phase the region has spent more, but on the first nothing anew.
        again = bytes_of(coordinator.train(train))
        assert {k: v for k, v in again.items() if k != "epsilon"} == {
            k: v for k, v in update.items() if k != "epsilon"
        }
        assert bytes_of(coordinator.personalise(personalise)) == scores
    assert ledger_of(tmp_path) == charged
    assert len(script.asked) == questions
    assert [e["release"] for e in charged] == [
        "region size",
        "update+loss+sketch",
        "rho vote",
        "held-out scores",
    ]
