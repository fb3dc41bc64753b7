"""The device and its user's own model: made here, kept here, scored for its user."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from scipy import stats

from client_app.adapt import RegionModel, Settings, adapt_user
from client_app.app import Device, app, workbench
from client_app.datasets.dataset import labels_of
from client_app.identity import Identity
from client_app.local_steps import Steps, walk
from client_app.user import FACTS, MODEL, load_user
from regionfed.config import Config
from regionfed.contract import (
    AdaptReply,
    AdaptRequest,
    DeltaRequest,
    GradientReply,
    GradientRequest,
    LossReply,
    LossRequest,
    ProfileReply,
    ProfileRequest,
    ScoreReply,
    ScoreRequest,
    decode,
    encode,
    message_type,
)
from regionfed.errors import ContractError
from regionfed.randomness import derive_seed
from server_app.in_process_grid import InProcessGrid, Node
from tests.conftest import RUN_ID, context_of, tiny_config

WHO = Identity("UK", 1)


class OneDevice:
    """A device with a folder of its own, behind a grid."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.bench = workbench(config)
        self.folder = folder
        self.theta = self.bench.layout.read(self.bench.task.module)
        told = {"region": WHO.region, "partition-id": WHO.index, "state-folder": str(folder)}
        self.grid = InProcessGrid({1: Node(app, context_of(1, told, config))}, RUN_ID)

    def ask(self, request: object, kind: type[Any]) -> Any:
        asked = Message(encode(request), dst_node_id=1, message_type=message_type(request))
        (reply,) = self.grid.send_and_receive([asked])
        if reply.has_error():
            raise ContractError(str(reply.error.reason))
        return decode(kind, reply.content, {})

    def adapt(self, point: torch.Tensor, update: torch.Tensor) -> Any:
        request = AdaptRequest(
            round=3,
            layout=self.bench.layout.fingerprint,
            steps=4,
            learning_rate=0.05,
            clip_norm=0.5,
            alpha_min=0.5,
            alpha_gain=1.0,
            update_noise_std=0.001,
            personalised=point,
            update=update,
        )
        return self.ask(request, AdaptReply)

    def score(self, point: torch.Tensor, *, with_user: bool = False) -> list[float]:
        layout = self.bench.layout.fingerprint
        request = ScoreRequest(3, layout, with_user, self.theta, point)
        scores: list[float] = self.ask(request, ScoreReply).scores
        return scores


def test_a_device_imports_no_accountant() -> None:
    """Flower starts a process per message, and SciPy would be a third of what it costs."""
    program = "import sys, client_app.app; print({'scipy', 'dp_accounting'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def device_of(t5_folder: Path, folder: Path, **settings: Any) -> OneDevice:
    config = tiny_config(
        model=str(t5_folder), regions=2, examples_per_client=24, user_steps=4, **settings
    )
    return OneDevice(config, folder)


def test_the_user_s_model_is_written_to_the_device_s_folder(
    t5_folder: Path, tmp_path: Path
) -> None:
    """What the pure functions give for the request and the device's own training examples."""
    device = device_of(t5_folder, tmp_path / "own")
    point, update = device.theta + 0.01, torch.full_like(device.theta, 1e-3)
    assert device.adapt(point, update) == AdaptReply()
    found = load_user(tmp_path / "own")
    expected = adapt_user(
        device.bench.task,
        device.bench.layout,
        RegionModel(point, update, 0.001),
        Device.at(device.bench, WHO).data.train,
        Settings(
            steps=4,
            learning_rate=0.05,
            clip_norm=0.5,
            alpha_min=0.5,
            alpha_gain=1.0,
            microbatch=device.bench.config.microbatch,
            seed=derive_seed(device.bench.config.seed, 3, "UK", 1),
        ),
    )
    assert torch.equal(found.own.part, expected.part) and bool(expected.part.any())
    assert (found.own.alpha, found.own.conflict) == (expected.alpha, expected.conflict)
    assert found.region == "UK" and found.belongs_to(point)
    assert [p.name for p in (tmp_path / "own").iterdir()] == [MODEL]


def test_the_user_is_told_three_scores_and_the_coordinator_two(
    t5_folder: Path, tmp_path: Path
) -> None:
    """The reply is the same as that of a device without a user's model."""
    device = device_of(t5_folder, tmp_path)
    before = device.score(device.theta)
    assert not (tmp_path / FACTS).exists()
    device.adapt(device.theta, torch.zeros_like(device.theta))
    assert device.score(device.theta) == before and len(before) == 3 * 3
    facts = json.loads((tmp_path / FACTS).read_text(encoding="utf-8"))
    assert set(facts["scores"]) == {"global", "personalised", "user"}
    own = Device.at(device.bench, WHO).scores(load_user(tmp_path).on(device.theta))
    assert facts["scores"]["user"].items() >= own.means(device.bench.dataset.tasks).items()


def test_a_device_does_not_send_its_user_s_scores_unless_its_own_settings_say_so(
    t5_folder: Path, tmp_path: Path
) -> None:
    """Whatever a coordinator asks for."""
    device = device_of(t5_folder, tmp_path)
    device.adapt(device.theta, torch.zeros_like(device.theta))
    with pytest.raises(ContractError, match="user-scores='device'"):
        device.score(device.theta, with_user=True)


def test_a_member_of_a_panel_sends_a_fourth_column(t5_folder: Path, tmp_path: Path) -> None:
    """Its own model's score; the region's where it has none, or one of another model."""
    device = device_of(t5_folder, tmp_path, user_scores="panel")
    without = device.score(device.theta, with_user=True)
    assert len(without) == 4 * 3 and without[3::4] == without[2::4]
    device.adapt(device.theta, torch.zeros_like(device.theta))
    own = Device.at(device.bench, WHO).scores(load_user(tmp_path).on(device.theta))
    assert device.score(device.theta, with_user=True)[3::4] == pytest.approx(list(own.sums))
    later = device.score(device.theta + 0.5, with_user=True)
    assert later[3::4] == later[2::4]


# ----------------------------------------------------------------------------- a device as one
def test_a_device_as_one_answers_within_its_bounds(t5_folder: Path, tmp_path: Path) -> None:
    """Delta, sketch, loss, votes, scores and counts: what the pure functions give, bounded."""
    device = device_of(t5_folder, tmp_path)
    bench = device.bench
    layout, p = bench.layout.fingerprint, bench.layout.size
    asked = DeltaRequest(
        round=2,
        layout=layout,
        clip_norm=0.25,
        loss_cap=8.0,
        sketch_seed=1,
        sketch_size=8,
        steps=2,
        learning_rate=0.05,
        optimiser="sgd",
        point=device.theta,
    )
    first, again, other = (
        device.ask(replace(asked, query=query), GradientReply) for query in (0, 0, 1)
    )
    assert torch.equal(first.total, again.total) and not torch.equal(first.total, other.total)
    train = Device.at(bench, WHO).data.train
    expected = walk(
        bench.task,
        bench.layout,
        device.theta,
        train,
        Steps(2, 0.05, derive_seed(bench.config.seed, "local steps", 2, 0, "UK", 1), "sgd"),
    )
    assert torch.allclose(first.total, -expected * min(1.0, 0.25 / float(expected.norm())))
    assert 0.0 < float(first.total.norm()) <= 0.25 * (1 + 1e-6)
    assert float(first.sketch.norm()) <= 0.25 * (1 + 1e-6) and 0.0 < first.loss <= 8.0
    vote = LossRequest(2, layout, 1.0, 1e-3, [0.5, 1.0], device.theta, torch.ones(p), as_one=True)
    assert math.hypot(*device.ask(vote, LossReply).differences) <= 1e-3 * (1 + 1e-6)
    scores = device.ask(
        ScoreRequest(2, layout, False, device.theta, device.theta, as_one=True), ScoreReply
    ).scores
    assert sum(scores[::3]) == pytest.approx(1.0)
    assert math.hypot(*scores) <= math.sqrt(3.0)
    whole = device.score(device.theta)
    held = sum(whole[::3])
    assert scores == pytest.approx([v / held for v in whole])


@pytest.mark.parametrize(("most", "counted"), [(0, 24), (5, 5), (100, 24)])
def test_a_device_counts_for_no_more_than_it_is_told(
    t5_folder: Path, tmp_path: Path, most: int, counted: int
) -> None:
    """Its labels shrink alike: all together they change a histogram by that at most."""
    device = device_of(t5_folder, tmp_path)
    layout = device.bench.layout.fingerprint
    labels = len(labels_of(device.bench.dataset))
    full = device.ask(ProfileRequest(layout, labels), ProfileReply)
    held = full.examples
    found = device.ask(ProfileRequest(layout, labels, most), ProfileReply)
    assert found.examples == min(counted, held)
    assert sum(found.histogram) <= found.examples + 1e-9
    assert found.histogram == pytest.approx([n * found.examples / held for n in full.histogram])


@pytest.mark.parametrize("noise_seed", [-1, 4])
def test_examples_are_drawn_by_poisson_sampling(
    t5_folder: Path, tmp_path: Path, noise_seed: int
) -> None:
    """Each with chance q, samples of all sizes, independent over rounds and examples."""
    device = Device.at(device_of(t5_folder, tmp_path, noise_seed=noise_seed).bench, WHO)
    examples, rounds, q, level = device.data.train, 1000, 0.2, 1e-5
    drawn = torch.zeros(rounds, len(examples))
    for round_ in range(rounds):
        taken = {id(e) for e in device.poisson_sample(q, round_, "sample 0")}
        drawn[round_] = torch.tensor([float(id(e) in taken) for e in examples])
    low, high = stats.binom.interval(1.0 - level / len(examples), rounds, q)
    assert low <= float(drawn.sum(0).min()) and float(drawn.sum(0).max()) <= high
    assert len(set(drawn.sum(1).tolist())) > 3
    centred = drawn - q
    after = (centred[:-1] * centred[1:]).mean(0) / (q * (1 - q))
    assert float(after.abs().max()) < 6.0 / math.sqrt(rounds)
    together = torch.corrcoef(drawn.T) - torch.eye(len(examples))
    assert float(together.abs().max()) < 6.0 / math.sqrt(rounds)


def test_on_a_schedule_each_example_has_its_turn_once_a_period(
    t5_folder: Path, tmp_path: Path
) -> None:
    """Whatever the seed, the purpose or the rate that a request says besides."""
    device = Device.at(device_of(t5_folder, tmp_path).bench, WHO)
    point = torch.zeros(device.bench.layout.size)
    taken: list[int] = []
    for round_ in range(5, 9):
        request = GradientRequest(round_, "layout", 0.9, 1.0, 8.0, 0, 0, point, 3, 0.0, period=4)
        sample = device.sample(request, f"sample {round_}")
        assert [id(e) for e in sample] == [id(e) for e in device.sample(request, "vote sample")]
        taken += [id(e) for e in sample]
    assert sorted(taken) == sorted(id(e) for e in device.data.train)
    # An example that is taken away changes nobody else's turn.
    first, *others = device.data.train
    fewer = replace(device, data=replace(device.data, train=others))
    request = GradientRequest(6, "layout", 0.9, 1.0, 8.0, 0, 0, point, 0, 0.0, period=4)
    kept = [id(e) for e in device.sample(request, "sample 0") if e is not first]
    assert [id(e) for e in fewer.sample(request, "sample 0")] == kept
