"""The device and its user's own model: made here, kept here, scored for its user."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from client_app.adapt import RegionModel, Settings, adapt_user
from client_app.app import Device, app, workbench
from client_app.identity import Identity
from client_app.user import FACTS, MODEL, load_user
from regionfed.config import Config
from regionfed.contract import (
    AdaptReply,
    AdaptRequest,
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
