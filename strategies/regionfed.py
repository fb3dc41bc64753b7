"""The global Flower Strategy: it only ever sees one noised update per region.

A round is two exchanges. `train`: regions return noised updates at their own personalised
models; their mean moves theta. `evaluate`: regions hear theta and the mean, update their own
part and, when it is time, return scores. All that is computed here comes from released values.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from regionfed.config import Config
from regionfed.conflict import centre_and_spread, conflict, noise_floor
from regionfed.contract import (
    RegionPersonalise,
    RegionScores,
    RegionTrain,
    RegionUpdate,
    decode,
    encode_each,
    message_type,
)
from regionfed.errors import ContractError, RunError
from regionfed.flower import reason_of
from regionfed.logs import log_context
from regionfed.privacy.plan import damped_step, score_columns
from regionfed.records import (
    Failure,
    RegionRecord,
    RoundRecord,
    Score,
    TaskScores,
    mean_and_rrs,
    mean_of,
    with_mean,
)
from regionfed.vector import CHUNK, from_arrays, to_arrays
from strategies.optimisers import ServerOptimiser

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerState:
    """What the server needs to go on after a round; saved by whoever observes the rounds.

    Attributes
    ----------
    round : int
        Rounds completed.
    theta : torch.Tensor
        The model that is trained, (p,).
    average : torch.Tensor
        The model that is deployed: the running average of theta, or theta itself; (p,).
    centre, spread : float or None
        Median and spread of the conflicts of round 1 (of the first round that had any).
    optimiser : Mapping[str, torch.Tensor]
    """

    round: int
    theta: torch.Tensor
    average: torch.Tensor
    centre: float | None
    spread: float | None
    optimiser: Mapping[str, torch.Tensor]


Observer = Callable[[RoundRecord, ServerState], None]


class RegionFed(Strategy):
    """Personalisation by region on noised gradients.

    Parameters
    ----------
    config : Config
    optimiser : ServerOptimiser
    regions : mapping of node id to region name
        Whose updates are expected.
    tasks : tuple of str
        In the order of the scores that regions send.
    layout : str
        Fingerprint of the model's layout.
    sketch_size : int
        Dimensions of the sketch that updates carry; 0 where they carry none.
    labels : int
        Length of the histograms that updates carry; 0 where they carry none.
    observers : iterable of callables
        Called after each round with its record and the state to save.
    resume : ServerState, optional
        Where to go on.
    """

    def __init__(
        self,
        config: Config,
        optimiser: ServerOptimiser,
        regions: Mapping[int, str],
        tasks: tuple[str, ...],
        layout: str,
        *,
        sketch_size: int = 0,
        labels: int = 0,
        observers: Iterable[Observer] = (),
        resume: ServerState | None = None,
    ) -> None:
        self._config = config
        self._optimiser = optimiser
        self._regions = dict(sorted(regions.items()))
        self._tasks = tasks
        self._layout = layout
        self._sketch_size = sketch_size
        self._labels = labels
        self._observers = tuple(observers)
        self._size: int | None = None
        self._round = 0
        self._theta = self._average = torch.zeros(0)
        self._centre: float | None = None
        self._spread: float | None = None
        if resume is not None:
            self._round = resume.round
            self._theta, self._average = resume.theta, resume.average
            self._centre, self._spread = resume.centre, resume.spread
            if resume.optimiser:
                optimiser.load_state_dict(resume.optimiser)
        self._updates: dict[int, RegionUpdate] = {}
        self._mean: tuple[torch.Tensor, torch.Tensor] = (torch.zeros(0), torch.zeros(0))
        self._failures: list[Failure] = []
        self._records = {name: RegionRecord() for name in self._regions.values()}
        self._evaluated: set[str] = set()

    def summary(self) -> None:
        """Log what this strategy is."""
        log.info(
            "RegionFed: %d regions, %d rounds, personaliser '%s', server optimiser '%s'",
            len(self._regions),
            self._config.rounds,
            self._config.personaliser,
            self._config.server_optimiser,
        )

    # ------------------------------------------------------------------------------ train
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask every region for its noised update at theta."""
        del config, grid
        self._failures, self._updates = [], {}
        self._theta = from_arrays("theta", arrays, self._size)
        self._size = self._theta.numel()
        if self._average.numel() != self._size:
            self._average = self._theta
        request = RegionTrain(round=server_round, layout=self._layout, theta=self._theta)
        return self._messages(dict.fromkeys(self._regions, request))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take the mean of the sound updates and move theta; None when too few came."""
        lengths = {"k": self._sketch_size, "labels": self._labels}
        self._updates = dict(
            self._sound(server_round, replies, self._regions, RegionUpdate, lengths)
        )
        if len(self._updates) < self._config.min_regions:
            return None, None
        updates = list(self._updates.values())
        # Equal weights: sizes would weigh in what a region's policy may not tell.
        update = _mean([u.update for u in updates])
        sketch = _mean([u.sketch for u in updates])
        self._mean = (update, sketch)
        config = self._config
        mean_std = math.hypot(*(u.update_noise_std for u in updates)) / len(updates)
        step = damped_step(config.server_lr, mean_std, config.rounds, config.noise_limit)
        self._theta = self._optimiser.step(self._theta, update * (step / config.server_lr))
        # The averaged model has seen many draws of noise; starting late would lose the early
        # progress, so the decay warms up (as in TensorFlow's ExponentialMovingAverage).
        decay = min(self._config.averaging, (1.0 + server_round) / (10.0 + server_round))
        self._average = torch.lerp(self._theta, self._average, decay) if decay else self._theta
        if self._centre is None:
            self._centre, self._spread = centre_and_spread(
                [self._conflict(node) for node in self._updates]
            )
        for u in updates:
            name = u.region
            self._records[name] = replace(
                _spent(self._records[name], u.epsilon), examples=round(u.examples)
            )
        loss = statistics.fmean(u.loss for u in updates)
        # Their vectors have been used: as many as regions, each as long as the model.
        self._updates = {
            node: replace(u, update=torch.zeros(0)) for node, u in self._updates.items()
        }
        return ArrayRecord(to_arrays("theta", self._theta)), MetricRecord({"loss": loss})

    # --------------------------------------------------------------------------- evaluate
    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Tell each region that took part the new model and what the mean of all was."""
        del arrays, config, grid
        self._evaluated = set()
        updates = self._updates.values()
        mean_examples = statistics.fmean(u.examples for u in updates) if updates else 0.0
        histogram = [
            math.fsum(counts) for counts in zip(*(u.histogram for u in updates), strict=True)
        ]
        return self._messages(
            {
                node: RegionPersonalise(
                    round=server_round,
                    layout=self._layout,
                    median_conflict=self._centre or 0.0,
                    conflict_spread=self._spread or 0.0,
                    noise_floor=self._noise_floor(node),
                    theta=self._average,
                    global_update=self._mean[0],
                    global_sketch=self._mean[1],
                    mean_examples=mean_examples,
                    global_histogram=histogram,
                )
                for node in self._updates
            }
        )

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Keep what the regions report of their personalisation."""
        lengths = {
            "columns*tasks": score_columns(self._config, server_round) * len(self._tasks),
        }
        for _, reply in self._sound(server_round, replies, self._updates, RegionScores, lengths):
            # Votes and gradients of this round were charged after the update had left.
            record = replace(
                _spent(self._records[reply.region], reply.epsilon),
                conflict=reply.conflict,
                alpha=reply.alpha,
                rho=reply.rho,
                strategy=reply.strategy or None,
                reason=reply.reason or None,
                rho_evaluations=reply.rho_evaluations,
                rho_messages=reply.rho_messages,
            )
            if reply.scored:
                global_, personalised, *user = self._task_scores(reply.scores)
                if unjudged := [task for task in self._tasks if global_[task] is None]:
                    reason = f"{reply.reason}; no held-out examples of {', '.join(unjudged)}"
                    record = replace(record, reason=reason)
                record = replace(record, global_=global_, personalised=personalised)
                record = replace(record, user=user[0] if user else None)
                self._evaluated.add(reply.region)
            self._records[reply.region] = record
        scores = mean_and_rrs(self._means("personalised"))
        if not self._evaluated or scores.mean is None or scores.rrs is None:
            return None
        return MetricRecord({"personalised-mean": scores.mean, "personalised-rrs": scores.rrs})

    def _task_scores(self, sums: list[float]) -> list[TaskScores]:
        """Turn the sums of each task, (count, one per model), into mean scores per model."""
        width = len(sums) // len(self._tasks)
        rows = {task: sums[width * i : width * (i + 1)] for i, task in enumerate(self._tasks)}
        return [
            with_mean({task: _ratio(row[model], row[0]) for task, row in rows.items()})
            for model in range(1, width)
        ]

    # -------------------------------------------------------------------------- the rounds
    def start(  # noqa: PLR0917 - Flower's signature
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Any = None,
    ) -> Result:
        """Run the rounds that are left and tell the observers of each.

        Flower's own loop cannot start in the middle, and goes on when nobody answers.

        Raises
        ------
        RunError
            After `max_failed_rounds` rounds in a row with too few regions.
        """
        del evaluate_fn
        self.summary()
        result = Result()
        arrays = initial_arrays
        empty = ConfigRecord()
        failed = 0
        for current in range(self._round + 1, num_rounds + 1):
            began = time.monotonic()
            messages = self.configure_train(current, arrays, train_config or empty, grid)
            replies = grid.send_and_receive(messages, timeout=timeout)
            new_arrays, train_metrics = self.aggregate_train(current, replies)
            del messages, replies  # each holds vectors as long as the model
            evaluate_metrics = None
            if new_arrays is not None:
                result.arrays = arrays = new_arrays
                messages = self.configure_evaluate(current, arrays, evaluate_config or empty, grid)
                replies = grid.send_and_receive(messages, timeout=timeout)
                evaluate_metrics = self.aggregate_evaluate(current, replies)
                del messages, replies
            if train_metrics is not None:
                result.train_metrics_clientapp[current] = train_metrics
            if evaluate_metrics is not None:
                result.evaluate_metrics_clientapp[current] = evaluate_metrics
            self._round = current
            record = self._record(num_rounds, train_metrics, time.monotonic() - began)
            for observe in self._observers:
                observe(record, self.state())
            failed = 0 if new_arrays is not None else failed + 1
            if failed >= self._config.max_failed_rounds:
                reasons = "; ".join(f"{f.region}: {f.reason}" for f in self._failures)
                raise RunError(
                    f"{failed} rounds in a row had fewer than min-regions="
                    f"{self._config.min_regions} regions. Last reasons: {reasons}"
                )
        return result

    def state(self) -> ServerState:
        """Return what is needed to go on from here."""
        return ServerState(
            round=self._round,
            theta=self._theta,
            average=self._average,
            centre=self._centre,
            spread=self._spread,
            optimiser=self._optimiser.state_dict(),
        )

    def state_at_start(self, theta: torch.Tensor) -> ServerState:
        """Return the state before the first round, at the model `theta`."""
        return replace(self.state(), theta=theta, average=theta)

    def _record(self, rounds: int, metrics: MetricRecord | None, seconds: float) -> RoundRecord:
        unbounded = any(u.epsilon < 0.0 for u in self._updates.values())
        epsilons = [r.epsilon for r in self._records.values() if r.epsilon is not None]
        loss = metrics["loss"] if metrics is not None else None
        return RoundRecord(
            round=self._round,
            rounds=rounds,
            answered=[u.region for u in self._updates.values()],
            failures=tuple(self._failures),
            loss=loss if isinstance(loss, float) else None,
            global_=mean_and_rrs(self._means("global_")) if self._evaluated else None,
            personalised=mean_and_rrs(self._means("personalised")) if self._evaluated else None,
            user=_known(mean_and_rrs(self._means("user"))),
            regions=dict(self._records),
            # Regions hold different people: the largest epsilon is everybody's bound, also that
            # of a region which spent it and then failed.
            epsilon=None if unbounded else max(epsilons, default=None),
            seconds=seconds,
        )

    # ----------------------------------------------------------------------------- common
    def _means(self, which: str) -> dict[str, float | None]:
        means: dict[str, float | None] = {}
        for name, record in self._records.items():
            scores: TaskScores | None = getattr(record, which)
            means[name] = mean_of(scores)
        return means

    def _messages(self, requests: Mapping[int, RegionTrain | RegionPersonalise]) -> list[Message]:
        """Return a message for each region; a list, for Flower's grid iterates more than once."""
        return [
            Message(
                records,
                dst_node_id=node,
                message_type=message_type(request),
                ttl=self._config.round_timeout,
                group_id=str(request.round),
            )
            for (node, request), records in zip(
                requests.items(), encode_each(requests.values()), strict=True
            )
        ]

    def _sound(
        self,
        round_: int,
        replies: Iterable[Message],
        expected: Mapping[int, object],
        kind: type[Any],
        lengths: Mapping[str, int] | None = None,
    ) -> list[tuple[int, Any]]:
        """Return the valid replies by node, in a fixed order; the others become failures."""
        sound: dict[int, Any] = {}
        seen: set[int] = set()
        for message in replies:
            node = message.metadata.src_node_id
            if node not in expected or node in seen:
                log.warning("round %d: unasked reply of node %d is dropped", round_, node)
                continue
            seen.add(node)
            if message.has_error():
                self._fail(node, round_, reason_of(message))
                continue
            try:
                reply = decode(kind, message.content, {"p": self._size or 0, **(lengths or {})})
            except ContractError as error:
                self._fail(node, round_, str(error))
                continue
            if reply.region != self._regions[node]:
                self._fail(node, round_, f"calls itself '{reply.region}'")
                continue
            sound[node] = reply
        for node in expected:
            if node not in seen:
                self._fail(
                    node,
                    round_,
                    f"no answer: offline, or silent for {self._config.round_timeout:g} s",
                )
        return sorted(sound.items())

    def _fail(self, node: int, round_: int, reason: str) -> None:
        name = self._regions[node]
        with log_context(region=name, round=round_):
            log.warning("round %d: region %s does not count: %s", round_, name, reason)
        self._failures.append(Failure(region=name, round=round_, reason=reason))

    def _in_sketch(self) -> bool:
        return self._config.conflict == "sketch" and self._sketch_size > 0

    def _noise_floor(self, node: int) -> float:
        updates = list(self._updates.values())
        stds = [u.sketch_noise_std if self._in_sketch() else u.update_noise_std for u in updates]
        dimensions = self._mean[1].numel() if self._in_sketch() else self._mean[0].numel()
        weights = [1.0 / len(updates)] * len(updates)
        return noise_floor(dimensions, stds, weights, list(self._updates).index(node))

    def _conflict(self, node: int) -> float:
        own = self._updates[node]
        difference = own.sketch - self._mean[1] if self._in_sketch() else own.update - self._mean[0]
        floor = 0.0 if self._config.conflict == "raw" else self._noise_floor(node)
        return conflict(float(difference.square().sum()), floor)


def _mean(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean (n,) of vectors (n,), a piece at a time: all of them are never stacked."""
    out = torch.empty_like(vectors[0])
    for start in range(0, len(out), CHUNK):
        piece = slice(start, start + CHUNK)
        torch.mean(torch.stack([v[piece] for v in vectors]), 0, out=out[piece])
    return out


def _known(score: Score) -> Score | None:
    return score if score.mean is not None else None


def _spent(record: RegionRecord, epsilon: float) -> RegionRecord:
    """Note what a region's ledger says; it never goes down, and -1 stands for no privacy."""
    return replace(record, epsilon=max(epsilon, record.epsilon or 0.0)) if epsilon >= 0 else record


def _ratio(total: float, count: float) -> float | None:
    """Return a mean score, or None without examples; noise may leave [0, 1], a score may not."""
    return min(max(total / count, 0.0), 1.0) if count >= 1.0 else None
