"""The device's ClientApp: it answers the coordinator's messages about its own examples.

What leaves the device: clipped sums (or one clipped change), loss differences, scores, a count.
They go to the region's coordinator only, under masks and noise where secure aggregation is on.
Examples, and whatever is made of a single one, stay here, and so does the user's own model.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from client_app.adapt import RegionModel, Settings, adapt_user
from client_app.datasets.dataset import ClientData, Example, FederatedDataset, histogram
from client_app.datasets.load import dataset_of
from client_app.gradients import clipped_sums, loss_differences
from client_app.identity import Identity, identity_of, state_folder
from client_app.local_steps import Steps, clipped_delta, mean_differences
from client_app.logged import logged
from client_app.secure_aggregation import secure_aggregation
from client_app.task import ScoreSums, Task, device_of, score_sums, task_of
from client_app.user import (
    MODEL,
    UserModel,
    fingerprint,
    load_user,
    save_facts,
    save_user,
)
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
)
from regionfed.discretion import discreet
from regionfed.errors import ContractError
from regionfed.privacy.banded import cyclic_turn
from regionfed.randomness import derive_seed, randomness_source
from regionfed.records import with_mean
from regionfed.sketch import sketch_signs
from regionfed.vector import Layout


@dataclass(frozen=True)
class Workbench:
    """What devices of one process share: the model (once, whatever their number) and the data."""

    config: Config
    task: Task
    layout: Layout
    dataset: FederatedDataset


@lru_cache(maxsize=1)
def workbench(config: Config) -> Workbench:
    """Return the process's workbench; weights are arguments, so sharing the module is safe."""
    task = task_of(config)
    return Workbench(config, task, Layout.of(task.module), dataset_of(config))


def _turn_of(example: Example) -> int:
    """Return a number that depends on an example alone.

    By its place among the others, one that is added would change the turns of all behind it.
    """
    return derive_seed("turn", example.task, example.source, example.target, example.group)


@dataclass(frozen=True)
class Device:
    """One device at one message: who it is, its data, and the workbench."""

    identity: Identity
    data: ClientData
    bench: Workbench

    @classmethod
    def of(cls, context: Context) -> "Device":
        """Resolve the device that a context speaks of."""
        bench = workbench(Config.from_run_config(context.run_config))
        return cls.at(bench, identity_of(context))

    @classmethod
    def at(cls, bench: Workbench, who: Identity) -> "Device":
        """Return a device by its identity."""
        return cls(who, bench.dataset.client(who.region, who.index), bench)

    def sample(self, request: GradientRequest | LossRequest, purpose: str) -> list[Example]:
        """Return the training examples that a request is about: drawn, or on schedule."""
        if request.period:
            return [
                example
                for example in self.data.train
                if cyclic_turn(_turn_of(example), request.period, request.round)
            ]
        return self.poisson_sample(request.sampling_rate, request.round, purpose)

    def poisson_sample(self, rate: float, round_: int, purpose: str) -> list[Example]:
        """Draw each training example with chance `rate`, independently and in secret.

        Amplification by sampling holds against whoever does not know who was drawn: the coins
        are private randomness, like noise.
        """
        config, who = self.bench.config, self.identity
        source = randomness_source(config.noise_seed)
        coins = source(purpose, config.seed, round_, who.region, who.index)
        drawn = coins.bernoulli(rate, len(self.data.train))
        return [e for e, taken in zip(self.data.train, drawn, strict=True) if taken]

    def scores(self, vector: torch.Tensor) -> ScoreSums:
        """Score a model (p,) on the held-out examples."""
        bench = self.bench
        weights = bench.layout.tensors(vector.to(device_of(bench.task)))
        return score_sums(bench.task, weights, self.data.test, bench.dataset.tasks)

    def same_layout(self, layout: str) -> None:
        """Refuse a vector that was flattened in another layout."""
        if layout != self.bench.layout.fingerprint:
            raise ContractError(
                f"the sender's model layout {layout} is not this device's "
                f"{self.bench.layout.fingerprint}: both ends must load the same model."
            )


log = logging.getLogger(__name__)

Request = TypeVar(
    "Request",
    GradientRequest,
    DeltaRequest,
    AdaptRequest,
    LossRequest,
    ScoreRequest,
    ProfileRequest,
)


def _asked(kind: type[Request], message: Message, context: Context) -> tuple[Device, Request]:
    """Return the device that is asked, and what for: decoded, and of this device's layout."""
    device = Device.of(context)
    request = decode(kind, message.content, {"p": device.bench.layout.size})
    device.same_layout(request.layout)
    return device, request


@discreet("this device")
def gradient(message: Message, context: Context) -> Message:
    """Answer `GradientRequest`."""
    device, request = _asked(GradientRequest, message, context)
    bench = device.bench
    sums = clipped_sums(
        bench.task,
        bench.layout,
        request.point,
        device.sample(request, f"sample {request.query}"),
        clip_norm=request.clip_norm,
        loss_cap=request.loss_cap,
        signs=sketch_signs(bench.layout, request.sketch_size, request.sketch_seed)
        if request.sketch_size
        else {},
        microbatch=bench.config.microbatch,
        inner_step=request.inner_step,
    )
    return _reply(message, GradientReply(sums.total, sums.sketch, sums.loss))


@discreet("this device")
def delta(message: Message, context: Context) -> Message:
    """Answer `DeltaRequest`: all examples together, as one."""
    device, request = _asked(DeltaRequest, message, context)
    bench, who = device.bench, device.identity
    order = derive_seed(
        bench.config.seed, "local steps", request.round, request.query, who.region, who.index
    )
    sums = clipped_delta(
        bench.task,
        bench.layout,
        request.point,
        device.data.train,
        steps=Steps(request.steps, request.learning_rate, order, request.optimiser),
        clip_norm=request.clip_norm,
        loss_cap=request.loss_cap,
        signs=sketch_signs(bench.layout, request.sketch_size, request.sketch_seed)
        if request.sketch_size
        else {},
        microbatch=bench.config.microbatch,
    )
    return _reply(message, GradientReply(sums.total, sums.sketch, sums.loss))


@discreet("this device")
def adapt(message: Message, context: Context) -> Message:
    """Answer `AdaptRequest`: the user's model goes to the device's own folder, nowhere else."""
    device, request = _asked(AdaptRequest, message, context)
    bench = device.bench
    who = device.identity
    try:
        own = adapt_user(
            bench.task,
            bench.layout,
            RegionModel(request.personalised, request.update, request.update_noise_std),
            device.data.train,
            Settings(
                steps=request.steps,
                learning_rate=request.learning_rate,
                clip_norm=request.clip_norm,
                alpha_min=request.alpha_min,
                alpha_gain=request.alpha_gain,
                microbatch=bench.config.microbatch,
                seed=derive_seed(bench.config.seed, request.round, who.region, who.index),
            ),
        )
    except Exception:
        # Not even that it failed is told: it depends on the user's examples.
        log.exception("no model of this user's own")
        return _reply(message, AdaptReply())
    base = fingerprint(request.personalised)
    save_user(state_folder(context), UserModel(own, who.region, request.layout, base))
    return _reply(message, AdaptReply())


@discreet("this device")
def loss(message: Message, context: Context) -> Message:
    """Answer `LossRequest`."""
    device, request = _asked(LossRequest, message, context)
    bench = device.bench
    differences = (mean_differences if request.as_one else loss_differences)(
        bench.task,
        bench.layout,
        request.base,
        request.direction,
        steps=request.steps,
        examples=device.sample(request, "vote sample"),
        clip_norm=request.clip_norm,
        microbatch=4 * bench.config.microbatch,
    )
    return _reply(message, LossReply(differences))


@discreet("this device")
def metrics(message: Message, context: Context) -> Message:
    """Answer `ScoreRequest`."""
    device, request = _asked(ScoreRequest, message, context)
    bench = device.bench
    if request.with_user and bench.config.user_scores != "panel":
        raise ContractError(
            "scores of the user's own model do not leave this device: user-scores='device'."
        )
    global_, personalised = (
        device.scores(vector) for vector in (request.theta, request.personalised)
    )
    user = _own_scores(device, state_folder(context), request, (global_, personalised))
    columns = [global_.counts, global_.sums, personalised.sums]
    if request.with_user:
        # Whoever has no model of its own uses the region's.
        columns.append((user or personalised).sums)
    scores = [v for row in zip(*columns, strict=True) for v in row]
    # The mean over examples: the device counts once, over all tasks together.
    held = max(sum(global_.counts), 1.0) if request.as_one else 1.0
    return _reply(message, ScoreReply([v / held for v in scores]))


def _own_scores(
    device: Device, folder: Path, request: ScoreRequest, others: tuple[ScoreSums, ScoreSums]
) -> ScoreSums | None:
    """Score the user's own model, if it belongs to this one of the region; tell the user of it."""
    if not (folder / MODEL).is_file():
        return None
    user = load_user(folder)
    if not user.belongs_to(request.personalised):
        return None
    own = device.scores(user.on(request.personalised))
    tasks = device.bench.dataset.tasks
    models = zip(("global", "personalised", "user"), (*others, own), strict=True)
    save_facts(
        folder,
        {
            "region": user.region,
            "round": request.round,
            "alpha": user.own.alpha,
            "conflict": user.own.conflict,
            "scores": {name: with_mean(sums.means(tasks)) for name, sums in models},
        },
    )
    return own


@discreet("this device")
def profile(message: Message, context: Context) -> Message:
    """Answer `ProfileRequest`."""
    device, request = _asked(ProfileRequest, message, context)
    train = device.data.train
    labels = histogram(device.bench.dataset, train) if request.labels else []
    counted = min(len(train), request.most or len(train))
    share = counted / max(len(train), 1)
    return _reply(message, ProfileReply(counted, [count * share for count in labels]))


def _reply(message: Message, reply: object) -> Message:
    return Message(encode(reply), reply_to=message)


def make_app(mods: Sequence[Mod] = ()) -> ClientApp:
    """Return a ClientApp of these handlers, behind the masks of secure aggregation.

    Parameters
    ----------
    mods : sequence of flwr.clientapp.typing.Mod
        Flower's mods, the first outermost: each sees a message on its way in and its reply on its
        way out, both in the open: masks come last. What a mod adds to a reply, or takes from it,
        the coordinator refuses.
    """
    made = ClientApp(mods=[logged, secure_aggregation, *mods])
    made.train("gradient")(gradient)
    made.train("delta")(delta)
    made.train("adapt")(adapt)
    made.evaluate("loss")(loss)
    made.evaluate("metrics")(metrics)
    made.query("profile")(profile)
    return made


app = make_app()
