"""What crosses from a region to the world: one noised update, and nothing that was not released.

Two rounds of the simulation's own wiring with a tiny model. The world's grid and the regions' own
grids are overheard; what the first carries is compared with what the second carried. Likewise what
leaves a device: a user's own model does not.
"""

import json
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord

import server_app.simulation
from client_app.datasets.load import dataset_of
from client_app.user import load_user
from region_app.coordinator import Coordinator
from region_app.state import RegionState, StateFolder
from regionfed.config import Config
from regionfed.contract import (
    AdaptReply,
    GradientReply,
    LossReply,
    ProfileReply,
    RegionPersonalise,
    RegionScores,
    RegionTrain,
    RegionUpdate,
    ScoreReply,
    decode,
)
from regionfed.flower import own_copy
from server_app.federation import Federation, prepare
from server_app.in_process_grid import InProcessGrid, Node
from server_app.simulation import World
from tests.conftest import Run, part, run_rounds, tiny_config

ROUNDS = 2
DEVICE_REPLIES: dict[str, Any] = {
    "train.gradient": GradientReply,
    "train.adapt": AdaptReply,
    "evaluate.loss": LossReply,
    "evaluate.metrics": ScoreReply,
    "query.profile": ProfileReply,
}


@dataclass
class Inside:
    """What stays in a region: its devices' replies, and its direction after each round."""

    replies: list[tuple[str, Any]] = field(default_factory=list)
    updates: list[GradientReply] = field(default_factory=list)  # those that make a round's update
    messages: list[Message] = field(default_factory=list)
    states: list[RegionState] = field(default_factory=list)

    def of(self, kind: type) -> list[Any]:
        return [reply for _, reply in self.replies if isinstance(reply, kind)]


@dataclass
class Overheard:
    """A run, all that crossed, and all that did not."""

    config: Config
    federation: Federation
    run: Run
    sent: list[Message]
    received: list[Message]
    inside: dict[str, Inside]
    folder: Path

    @property
    def crossed(self) -> list[Message]:
        return [*self.sent, *self.received]


def copy_of(message: Message) -> Message:
    """Return a picture of a message, whatever is done to the message later."""
    if message.has_error():
        return message
    picture: Message = pickle.loads(pickle.dumps(message))
    return picture


class WorldGrid(InProcessGrid):
    """The grid between world and regions, overheard."""

    def __init__(self, nodes: dict[int, Node], run_id: int) -> None:
        super().__init__(nodes, run_id)
        self.sent: list[Message] = []
        self.received: list[Message] = []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        messages = list(messages)
        self.sent += map(copy_of, messages)
        for reply in super().send_and_receive(messages, timeout=timeout):
            self.received.append(copy_of(reply))
            yield reply


def overhear(config: Config, folder: Path, patch: pytest.MonkeyPatch) -> Overheard:
    """Run a simulated world with an ear in every region and one between them and the world."""
    federation = prepare(config)
    inside = {name: Inside() for name in federation.regions.values()}

    class DeviceGrid(InProcessGrid):
        def __init__(self, nodes: dict[int, Node], run_id: int) -> None:
            super().__init__(nodes, run_id)
            (self.region,) = {str(n.context.node_config["region"]) for n in nodes.values()}

        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> Iterator[Message]:
            messages = list(messages)
            query = part(messages[0].content, "config").get("query", 0)
            for reply in super().send_and_receive(messages, timeout=timeout):
                kind = DEVICE_REPLIES[reply.metadata.message_type]
                found = decode(kind, own_copy(reply.content), {})
                inside[self.region].replies.append((reply.metadata.message_type, found))
                if isinstance(found, GradientReply) and not query:
                    inside[self.region].updates.append(found)
                inside[self.region].messages.append(copy_of(reply))
                yield reply

    save = StateFolder.save

    def saved(self: StateFolder, state: RegionState) -> None:
        inside[self._folder.name].states.append(state)
        save(self, state)

    patch.setattr(server_app.simulation, "InProcessGrid", DeviceGrid)
    patch.setattr(StateFolder, "save", saved)
    world = World(
        config=config,
        plan=federation.plan,
        regions=federation.regions,
        devices=federation.devices,
        tasks=federation.tasks,
        folder=folder,
        run_id=1,
    )
    grid = WorldGrid(world.build(list(federation.regions)), 1)
    run = run_rounds(
        grid,
        dict(federation.regions),
        config,
        federation.theta,
        tasks=federation.tasks,
        layout=federation.layout.fingerprint,
        labels=federation.plan.labels,
    )
    return Overheard(config, federation, run, grid.sent, grid.received, inside, folder)


def whole_config(t5_folder: Path, **settings: Any) -> Config:
    """Return the settings of a run in which every phase takes place."""
    values: dict[str, Any] = {
        "model": str(t5_folder),
        "rounds": ROUNDS,
        "examples_per_client": 24,
        "size_noise_multiplier": 5.0,
        "rho_every": 1,
        "rho_evaluations": 2,
        "evaluate_every": 1,
        "evaluation_privacy": "noised",
        "user_steps": 2,
        **settings,
    }
    return tiny_config(**values)


@pytest.fixture(scope="module", params=["residual", "dynamic"])
def heard(
    request: pytest.FixtureRequest, t5_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Overheard:
    """Two overheard rounds: every phase in both, users' models in the last; further gradients
    for `dynamic`."""
    # Every region is large enough for Interp, or it is Meta's.
    config = whole_config(t5_folder, personaliser=request.param, size_threshold=0.0)
    with pytest.MonkeyPatch.context() as patch:
        return overhear(config, tmp_path_factory.mktemp("run"), patch)


# ---------------------------------------------------------------------------------- how much
def test_the_run_was_whole(heard: Overheard) -> None:
    """Else the rest proves nothing: both regions answered, and all phases took place inside."""
    for record in heard.run.records:
        assert list(record.answered) == list(heard.federation.regions.values())
        assert not record.failures
    for region in heard.inside.values():
        devices = 2
        assert len(region.of(ProfileReply)) == devices
        for kind in (LossReply, ScoreReply):
            assert len(region.of(kind)) == devices * ROUNDS
        assert len(region.updates) == devices * ROUNDS
        further = len(region.of(GradientReply)) - len(region.updates)
        assert (further > 0) == (heard.config.personaliser == "dynamic")
        assert len(region.of(AdaptReply)) == devices
        assert any(bool(r.total.any()) for r in region.of(GradientReply))
        assert bool(region.states[-1].direction.any())


def test_exactly_one_update_and_one_answer_cross_per_region_and_round(heard: Overheard) -> None:
    """Two round trips; no other message, and no other direction."""
    nodes = list(heard.federation.regions)
    expected = [(n, t) for _ in range(ROUNDS) for t in ("train", "evaluate") for n in nodes]
    sent = [(m.metadata.dst_node_id, m.metadata.message_type) for m in heard.sent]
    received = [(m.metadata.src_node_id, m.metadata.message_type) for m in heard.received]
    assert sent == expected and received == expected
    rounds = [part(m.content, "config")["round"] for m in heard.sent]
    assert rounds == [r for r in range(1, ROUNDS + 1) for _ in range(2 * len(nodes))]


def keys_of(message: Message) -> list[str]:
    arrays = part(message.content, "arrays") if "arrays" in message.content else ArrayRecord()
    metrics = part(message.content, "metrics") if "metrics" in message.content else MetricRecord()
    config = part(message.content, "config")
    assert isinstance(config, ConfigRecord)
    assert set(message.content) <= {"arrays", "metrics", "config"}
    return sorted([*(k.rpartition("/")[0] for k in arrays), *metrics, *config])


def test_the_keys_are_those_of_the_contract_and_no_others(heard: Overheard) -> None:
    """RegionUpdate and RegionScores, nothing rides along; requests likewise."""
    kinds = {
        ("sent", "train"): RegionTrain,
        ("sent", "evaluate"): RegionPersonalise,
        ("received", "train"): RegionUpdate,
        ("received", "evaluate"): RegionScores,
    }
    for way, messages in (("sent", heard.sent), ("received", heard.received)):
        for message in messages:
            kind = kinds[way, message.metadata.message_type]
            expected = ["contract.version", *(f.name for f in fields(kind))]
            assert keys_of(message) == sorted(expected)
            assert decode(kind, message.content, {}) is not None


def test_the_world_sees_regions_and_no_devices(heard: Overheard) -> None:
    """Node ids that cross are those of regions."""
    ids = {m.metadata.src_node_id for m in heard.received}
    assert ids == set(heard.federation.regions)


# ------------------------------------------------------------------------------------- vectors
def vectors_of(messages: Iterable[Message]) -> list[tuple[str, torch.Tensor]]:
    """Return every array that crossed, whole, with the message and name it had."""
    out = []
    for message in messages:
        if "arrays" not in message.content:
            continue
        arrays = part(message.content, "arrays")
        for name in {key.rpartition("/")[0] for key in arrays}:
            count = sum(key.rpartition("/")[0] == name for key in arrays)
            parts = [torch.from_numpy(arrays[f"{name}/{i}"].numpy().copy()) for i in range(count)]
            out.append((f"{message.metadata.message_type}.{name}", torch.cat(parts)))
    return out


def likeness(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return |cos| of two vectors: 1 if one is the other in some scale, whatever the scale."""
    a, b = a.double(), b.double()
    return float((a @ b).abs() / (a.norm() * b.norm()).clamp(min=1e-30))


def assert_never_crosses(
    heard: Overheard, secrets: Iterable[torch.Tensor], messages: Iterable[Message]
) -> int:
    """Check that no array that crossed is a secret or close to one, in any scale; count them."""
    compared = 0
    crossed = vectors_of(messages)
    for secret in secrets:
        if not bool(secret.any()):
            continue
        for name, vector in crossed:
            if vector.shape != secret.shape:
                continue
            compared += 1
            assert not torch.equal(vector, secret), name
            distance = float((vector - secret).norm())
            assert distance > 0.1 * float(secret.norm()), name
            assert likeness(vector, secret) < 0.9, name
    return compared


def test_no_client_s_sum_ever_crosses(heard: Overheard) -> None:
    """Neither gradients nor sketches of a device, in any scale."""
    secrets = [
        vector
        for region in heard.inside.values()
        for reply in region.of(GradientReply)
        for vector in (reply.total, reply.sketch)
    ]
    assert assert_never_crosses(heard, secrets, heard.crossed) > 100


def unnoised_sums(inside: Inside) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return per round the sums over devices of gradients and sketches."""
    replies = inside.updates
    rounds = [replies[i : i + 2] for i in range(0, len(replies), 2)]
    return [(sum(r.total for r in pair), sum(r.sketch for r in pair)) for pair in rounds]


def test_no_unnoised_sum_of_a_region_ever_crosses(heard: Overheard) -> None:
    """Nor the sum over regions: what is released is noise for the greater part."""
    regions = list(heard.inside.values())
    secrets = [v for region in regions for pair in unnoised_sums(region) for v in pair]
    for both in zip(*(unnoised_sums(region) for region in regions), strict=True):
        secrets += [sum(pair[i] for pair in both) for i in (0, 1)]
    assert assert_never_crosses(heard, secrets, heard.crossed) > 50


def test_the_update_is_the_sum_plus_the_declared_noise(heard: Overheard) -> None:
    """The control: the overheard sums are the right ones, and noise is all that stands between."""
    for node, name in heard.federation.regions.items():
        updates = [
            decode(RegionUpdate, m.content, {})
            for m in heard.received
            if m.metadata.src_node_id == node and m.metadata.message_type == "train"
        ]
        for update, (total, _) in zip(updates, unnoised_sums(heard.inside[name]), strict=True):
            batch = heard.config.sampling_rate * update.examples
            noise = update.update - total / batch
            assert float(noise.std()) == pytest.approx(update.update_noise_std, rel=0.05)
            assert likeness(noise, total) < 0.2


def test_theta_r_never_crosses(heard: Overheard) -> None:
    """The direction, in any scale, and the personalised model stay in the region."""
    thetas = [heard.federation.theta, *(s.theta for s in heard.run.states)]
    directions, models = [], []
    for region in heard.inside.values():
        for state in region.states:
            if bool(state.direction.any()):
                directions.append(state.direction)
                models += [theta + state.own_part() for theta in thetas if state.rho > 0.0]
    assert len(directions) == 2 * ROUNDS
    # A region's direction is made of its own released updates and the mean; alone it is neither.
    for secret in directions:
        for name, vector in vectors_of(heard.crossed):
            if vector.shape == secret.shape:
                assert not torch.allclose(vector, secret, rtol=1e-3), name
                assert likeness(vector, secret) < 0.99, name
    for secret in models:
        for name, vector in vectors_of(heard.crossed):
            if vector.shape == secret.shape:
                assert not torch.allclose(vector, secret, rtol=1e-4, atol=1e-6), name


# ------------------------------------------------------------------------------------- numbers
def numbers_of(messages: Iterable[Message]) -> list[float]:
    out: list[float] = []
    for message in messages:
        for record in message.content.values():
            if isinstance(record, (MetricRecord, ConfigRecord)):
                for value in record.values():
                    values = value if isinstance(value, list) else [value]
                    out += [float(v) for v in values if type(v) in (int, float)]
    return out


def test_no_raw_number_of_a_device_or_region_crosses(heard: Overheard) -> None:
    """Losses, votes and sizes: neither a device's nor the region's own, nor its mean."""
    crossed = numbers_of(heard.received)
    secrets: list[float] = []
    for region in heard.inside.values():
        sizes = [float(r.examples) for r in region.of(ProfileReply)]
        losses = [r.loss for r in region.updates]
        votes = [v for r in region.of(LossReply) for v in r.differences]
        per_round = [sum(losses[i : i + 2]) for i in range(0, len(losses), 2)]
        means = [v / (heard.config.sampling_rate * sum(sizes)) for v in per_round]
        secrets += [*sizes, sum(sizes), *losses, *votes, *per_round, *means]
    for secret in secrets:
        if abs(secret) > 1e-6:
            assert not any(abs(c - secret) < 1e-6 * abs(secret) for c in crossed), secret


def test_labels_cross_with_noise_only(heard: Overheard) -> None:
    """As the region's sum, the same each round; not at all where nobody compares them."""
    for node, name in heard.federation.regions.items():
        replies = heard.inside[name].of(ProfileReply)
        true = [sum(counts) for counts in zip(*(r.histogram for r in replies), strict=True)]
        crossed = [
            decode(RegionUpdate, m.content, {}).histogram
            for m in heard.received
            if m.metadata.src_node_id == node and m.metadata.message_type == "train"
        ]
        assert len(crossed) == ROUNDS and all(found == crossed[0] for found in crossed)
        assert len(crossed[0]) == len(true) == heard.federation.plan.labels
        assert all(abs(a - b) > 1e-4 for a, b in zip(crossed[0], true, strict=True))
        assert (sum(true) > 0) == (heard.config.personaliser == "dynamic")


def test_scores_cross_with_noise_only(heard: Overheard) -> None:
    """No count and no sum of a region's held-out examples is the true one."""
    for node, name in heard.federation.regions.items():
        replies = heard.inside[name].of(ScoreReply)
        answers = [
            decode(RegionScores, m.content, {})
            for m in heard.received
            if m.metadata.src_node_id == node and m.metadata.message_type == "evaluate"
        ]
        for round_, answer in enumerate(answers):
            assert answer.scored
            true = [
                sum(column)
                for column in zip(
                    *(r.scores for r in replies[2 * round_ : 2 * round_ + 2]), strict=True
                )
            ]
            assert len(answer.scores) == len(true)
            assert all(abs(a - b) > 1e-4 for a, b in zip(answer.scores, true, strict=True))


# --------------------------------------------------------------------------------- the user level
def payload_of(message: Message) -> bytes:
    """Return every byte of a reply's content: arrays, numbers, names, in a fixed order."""
    assert not message.has_error(), message.error.reason
    data = message.metadata.message_type.encode()
    for name, record in sorted(message.content.items()):
        for key, value in sorted(record.items()):
            held = value.data if isinstance(record, ArrayRecord) else pickle.dumps(value)
            data += f"|{name}.{key}=".encode() + held
    return data


def device_messages(heard: Overheard) -> list[Message]:
    """Return all replies of all devices, of every type, in the order in which they were made."""
    return [m for region in heard.inside.values() for m in region.messages]


def users_of(heard: Overheard) -> list[torch.Tensor]:
    """Return every user's own part, alpha_u theta_u_local and theta_u_local, from its own disk."""
    found = []
    for path in sorted(heard.folder.glob("devices/*/*")):
        own = load_user(path).own
        found += [own.part, own.alpha * own.part]
    return found


def test_a_user_s_model_is_in_no_byte_that_leaves_its_device(heard: Overheard) -> None:
    """All replies of all types, serialised: neither theta_u_local nor theta_u, in any scale."""
    messages = device_messages(heard)
    assert {m.metadata.message_type for m in messages} == set(DEVICE_REPLIES)
    users = users_of(heard)
    assert len(users) == 2 * 2 * 2 and all(bool(u.any()) for u in users)
    bases = [
        state.theta + region.states[-1].own_part()
        for state in heard.run.states[-1:]
        for region in heard.inside.values()
    ]
    models = [base + user for base in bases for user in users]
    payloads = [payload_of(m) for m in (*messages, *heard.crossed)]
    for secret in (*users, *models):
        data = secret.numpy().tobytes()
        # Eight weights in a row, at places all over the vector, would betray a copy of a part.
        pieces = [data[i : i + 32] for i in range(0, len(data) - 32, 4096)]
        pieces = [piece for piece in pieces if any(piece)]
        assert len(pieces) > 3
        assert not any(piece in payload for piece in pieces for payload in payloads)
    for secret in users:
        for name, vector in vectors_of(messages):
            if vector.shape == secret.shape and bool(vector.any()):
                assert likeness(vector, secret) < 0.9, name


def test_a_device_that_has_adapted_says_so_and_nothing_else(heard: Overheard) -> None:
    """The acknowledgement holds the version of the contract: the same bytes for everybody."""
    done = [m for m in device_messages(heard) if m.metadata.message_type == "train.adapt"]
    assert len({payload_of(m) for m in done}) == 1
    assert [keys_of(m) for m in done] == [["contract.version"]] * 4


def test_nothing_that_leaves_a_device_depends_on_the_user_s_model(
    heard: Overheard, t5_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users' models, same seeds: every byte of every device and region is the same."""
    config = replace(heard.config, user_steps=9, user_lr=0.1)
    other = overhear(config, tmp_path, monkeypatch)
    for one, two in zip(users_of(heard), users_of(other), strict=True):
        assert not torch.allclose(one, two)
    for one, two in (
        (device_messages(heard), device_messages(other)),
        (heard.received, other.received),
    ):
        assert [payload_of(m) for m in one] == [payload_of(m) for m in two]


def test_a_panel_s_user_scores_leave_as_the_fourth_column_alone(
    t5_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where consent was given: on the last round, and they are what each device told its user."""
    config = whole_config(t5_folder, evaluation_privacy="panel", user_scores="panel", user_lr=0.1)
    heard = overhear(config, tmp_path, monkeypatch)
    tasks = heard.federation.tasks
    first, last = heard.run.records
    assert first.user is None and last.user is not None
    for name, region in heard.inside.items():
        early, late = region.of(ScoreReply)[:2], region.of(ScoreReply)[2:]
        assert {len(r.scores) for r in early} == {3 * len(tasks)}
        assert {len(r.scores) for r in late} == {4 * len(tasks)}
        for index, reply in enumerate(late):
            facts = json.loads((tmp_path / "devices" / name / str(index) / "user.json").read_text())
            for i, task in enumerate(tasks):
                count, *sums = reply.scores[4 * i : 4 * i + 4]
                for model, total in zip(("global", "personalised", "user"), sums, strict=True):
                    expected = total / count if count else None
                    assert facts["scores"][model][task] == pytest.approx(expected)
        scores = last.regions[name].user
        assert scores is not None
        for i, task in enumerate(tasks):
            total = sum(r.scores[4 * i + 3] for r in late) / sum(r.scores[4 * i] for r in late)
            assert scores[task] == pytest.approx(total)


# ---------------------------------------------------------------------------------------- text
def texts_of(config: Config) -> set[str]:
    """Return every source text of every device that is long enough to be nobody else's."""
    dataset = dataset_of(config)
    texts = set()
    for region in dataset.regions:
        for index in range(dataset.clients(region)):
            data = dataset.client(region, index)
            texts |= {e.source for e in (*data.train, *data.test) if len(e.source) >= 8}
    return texts


def test_no_text_is_in_any_byte_that_crosses(heard: Overheard) -> None:
    """Serialised whole, metadata and all: no source text of any device is in it."""
    texts = texts_of(heard.config)
    assert len(texts) > 50
    for message in heard.crossed:
        assert not message.has_error()
        data = pickle.dumps(message.content) + repr(message.metadata).encode()
        for record in message.content.values():
            if isinstance(record, ArrayRecord):
                data += b"".join(array.data for array in record.values())
        found = [text for text in texts if text.encode() in data]
        assert not found


def test_the_text_of_an_error_stays_in_the_region(
    t5_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception may quote data: of an unforeseen one only the type crosses."""
    config = tiny_config(model=str(t5_folder), rounds=1, min_regions=1, max_failed_rounds=9)
    secret = sorted(texts_of(config))[0]

    def fail(self: Coordinator, request: RegionTrain) -> RegionUpdate:
        raise ValueError(f"cannot encode '{secret}'")

    monkeypatch.setattr(Coordinator, "train", fail)
    heard = overhear(config, tmp_path, monkeypatch)
    assert len(heard.received) == 2
    for message in heard.received:
        assert message.has_error()
        reason = str(message.error.reason)
        assert secret not in reason and "ValueError" in reason
    (record,) = heard.run.records
    assert all(secret not in f.reason for f in record.failures)
