"""The regional coordinator: sums its devices' replies, noises once, personalises.

It knows its devices only through Flower's `Grid`, so it is the same in simulation and in
deployment. What it returns has been noised, charged to the ledger and saved, in the order
ledger -> noise -> save -> return: a crash in between can waste privacy but never leak it.
"""

import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from flwr.serverapp import Grid

from region_app.exchange import await_nodes, exchange
from region_app.rho import best_rho, bracket, possible_points
from region_app.state import RegionState, StateFolder
from regionfed.config import Config
from regionfed.conflict import conflict, personalisation_weight
from regionfed.contract import (
    AdaptReply,
    AdaptRequest,
    GradientReply,
    GradientRequest,
    LossReply,
    LossRequest,
    ProfileReply,
    ProfileRequest,
    RegionPersonalise,
    RegionScores,
    RegionTrain,
    RegionUpdate,
    ScoreReply,
    ScoreRequest,
)
from regionfed.errors import RunError
from regionfed.personaliser import Personaliser, Released
from regionfed.privacy.ledger import Ledger
from regionfed.privacy.mechanism import GaussianSum
from regionfed.privacy.plan import (
    HELD_OUT,
    LOSS_CAP,
    TRAIN,
    VOTE_BOUND,
    PrivacyPlan,
    adapts,
    evaluates,
    score_columns,
    searches_rho,
)
from regionfed.randomness import derive_seed, randomness_source

log = logging.getLogger(__name__)

R = TypeVar("R")

# A region takes part when its noised size is this many standard deviations from none.
_SURE = 3.0


class Coordinator:
    """One region's coordinator.

    Parameters
    ----------
    region : str
    grid : Grid
        Its devices.
    devices : int
        How many are declared; the first round waits for them.
    config : Config
    plan : PrivacyPlan
    personaliser : Personaliser
    tasks : sequence of str
    folder : Path
        The region's own disk: ledger and state. Nothing of it leaves.
    """

    def __init__(
        self,
        *,
        region: str,
        grid: Grid,
        devices: int,
        config: Config,
        plan: PrivacyPlan,
        personaliser: Personaliser,
        tasks: tuple[str, ...],
        folder: Path,
    ) -> None:
        self._region = region
        self._grid = grid
        self._devices = devices
        self._config = config
        self._plan = plan
        self._personaliser = personaliser
        self._tasks = tasks
        self._ledger = Ledger(folder / "ledger.jsonl", config.delta, plan.budgets)
        self._states = StateFolder(folder)
        self._randomness = randomness_source(config.noise_seed)
        self._nodes: list[int] = []
        self._refused = 0

    # ------------------------------------------------------------------------------ train
    def train(self, request: RegionTrain) -> RegionUpdate:
        """Return the region's noised update at theta + alpha_r theta_r.

        Raises
        ------
        RunError
            If no device answered, or the region holds no data: it sits the round out.
        PrivacyError
            If the release would exceed the budget.
        """
        state = self._state_before(request)
        tensors, facts = self._update_of(request.round) or self._release_update(request, state)
        std = self._noise_stds(state)
        return RegionUpdate(
            region=self._region,
            update=tensors["update"],
            sketch=tensors.get("sketch", torch.zeros(0)),
            loss=float(tensors["loss"]),
            examples=state.examples,
            update_noise_std=std["update"],
            sketch_noise_std=std.get("sketch", 0.0),
            epsilon=self._spent(TRAIN),
            quarantined=int(facts["quarantined"]),
        )

    def _update_of(self, round_: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        return self._states.load_release("update", round_)

    def _release_update(
        self, request: RegionTrain, state: RegionState
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        least = max(1.0, _SURE * self._plan.size.parts[0].noise_std)
        if state.examples < least:
            # Its noised size cannot be told from that of a region without any data.
            raise RunError(
                f"region {self._region} has no data, or too little: its noised size is below "
                f"{least:g}. It sits out; a lower size-noise-multiplier admits smaller regions."
            )
        config = self._config
        size = self._plan.sketch_size
        asked = GradientRequest(
            round=request.round,
            layout=request.layout,
            sampling_rate=config.sampling_rate,
            clip_norm=config.clip_norm,
            loss_cap=LOSS_CAP,
            sketch_seed=derive_seed(config.seed, "sketch"),
            sketch_size=size,
            point=request.theta + state.own_part(),
        )
        sums = {"update": torch.zeros_like(request.theta), "loss": torch.zeros(1)}
        if size:
            sums["sketch"] = torch.zeros(size)
        answered = 0
        for reply in self._ask(asked, GradientReply, {"p": request.theta.numel(), "k": size}):
            sums["update"] += reply.total
            sums["loss"] += reply.loss
            if size:
                sums["sketch"] += reply.sketch
            answered += 1
        self._require_answers(answered)
        noised = self._release(self._plan.update, sums, request.round)
        # A fixed denominator: the realised count would be a second, unaccounted release.
        batch = self._expected_batch(state)
        update = {name: total.div_(batch) for name, total in noised.items()}
        # The noise is kept beside what it is on: whoever reads the update needs to know.
        facts = {"quarantined": self._refused, "noise_std": self._noise_stds(state)["update"]}
        self._states.save_release("update", request.round, update, facts)
        return update, facts

    # ------------------------------------------------------------------------ personalise
    def personalise(self, request: RegionPersonalise) -> RegionScores:
        """Update theta_r, alpha_r and rho from released values, then score if it is time."""
        if (answered := self._states.load_release("scores", request.round)) is not None:
            return RegionScores(**answered[1])
        config = self._config
        before = self._state_before(request)
        released = self._update_of(request.round)
        if released is None:
            raise RunError(f"region {self._region} took no part in round {request.round}.")
        own = released[0]
        distance = self._squared_distance(own, request)
        floor = 0.0 if config.conflict == "raw" else request.noise_floor
        d = conflict(distance, floor)
        alpha = personalisation_weight(
            d,
            request.median_conflict,
            request.conflict_spread,
            config.alpha_min,
            config.alpha_gain,
        )
        proposal = self._personaliser.propose(
            Released(
                round=request.round,
                update=own["update"],
                global_update=request.global_update,
                theta=request.theta,
                previous=before.direction,
                noise_std=self._noise_stds(before)["update"],
            )
        )
        rho = before.rho
        if self._personaliser.searches_rho and searches_rho(config, request.round):
            rho = self._search_rho(request, alpha * proposal.direction, before)
        state = RegionState(request.round, proposal.direction, rho, alpha, before.examples)
        if adapts(config, request.round):
            self._adapt(request, own["update"], state)
        scores = [0.0] * (score_columns(config, request.round) * len(self._tasks))
        scored = evaluates(config, request.round)
        if scored:
            scores = self._score(request, state)
        answer = RegionScores(
            region=self._region,
            strategy=proposal.strategy,
            reason=proposal.reason,
            scored=scored,
            conflict=d,
            alpha=alpha,
            rho=rho,
            epsilon=self._spent(TRAIN),
            evaluation_epsilon=self._spent(HELD_OUT),
            scores=scores,
        )
        # The state first: a crash in between repeats the scoring, and loses no round.
        self._states.save(state)
        self._states.save_release("scores", request.round, {}, asdict(answer))
        return answer

    def _squared_distance(self, own: dict[str, torch.Tensor], request: RegionPersonalise) -> float:
        if self._plan.sketch_size:
            difference = own["sketch"] - request.global_sketch
        else:
            difference = own["update"] - request.global_update
        return float(difference.square().sum())

    def _search_rho(
        self, request: RegionPersonalise, direction: torch.Tensor, before: RegionState
    ) -> float:
        config = self._config
        low, high = bracket(before.rho, config.rho_high)
        points = possible_points(low, high, config.rho_evaluations)
        asked = LossRequest(
            round=request.round,
            layout=request.layout,
            sampling_rate=config.sampling_rate,
            clip_norm=VOTE_BOUND,
            steps=points,
            base=request.theta,
            direction=direction,
        )
        votes = torch.zeros(len(points))
        for reply in self._ask(asked, LossReply, {"steps": len(points)}):
            votes += torch.tensor(reply.differences)
        released = self._release(self._plan.vote, {"vote": votes}, request.round)["vote"]
        return best_rho(points, released.tolist(), low, high, config.rho_evaluations)

    def _adapt(self, request: RegionPersonalise, update: torch.Tensor, state: RegionState) -> None:
        """Hand the region's model to the devices; what they make of it stays with them."""
        config = self._config
        asked = AdaptRequest(
            round=request.round,
            layout=request.layout,
            steps=config.user_steps,
            learning_rate=config.user_lr,
            clip_norm=config.clip_norm,
            alpha_min=config.alpha_min,
            alpha_gain=config.alpha_gain,
            update_noise_std=self._noise_stds(state)["update"],
            personalised=request.theta + state.own_part(),
            update=update,
        )
        done = sum(1 for _ in self._ask(asked, AdaptReply, {}))
        log.info("region %s: %d of %d devices adapted", self._region, done, len(self._nodes))

    def _score(self, request: RegionPersonalise, state: RegionState) -> list[float]:
        columns = score_columns(self._config, request.round)
        asked = ScoreRequest(
            round=request.round,
            layout=request.layout,
            with_user=columns == 4,
            theta=request.theta,
            personalised=request.theta + state.own_part(),
        )
        length = columns * len(self._tasks)
        sums = torch.zeros(length)
        for reply in self._ask(asked, ScoreReply, {"columns*tasks": length}):
            sums += torch.tensor(reply.scores)
        released = self._release(self._plan.scores, {"scores": sums}, request.round)["scores"]
        return [float(v) for v in released]

    # ----------------------------------------------------------------------------- common
    def _ask(self, request: object, reply: type[R], lengths: dict[str, int]) -> Iterator[R]:
        self._refused = 0
        return exchange(
            self._grid,
            self._nodes,
            request,
            reply,
            lengths,
            timeout=self._config.round_timeout,
            quarantine=self._quarantine,
        )

    def _quarantine(self, reason: str) -> None:
        # Stays in the region's own log: which device failed, and why, is nobody else's business.
        self._refused += 1
        log.warning("region %s: %s", self._region, reason)

    def _release(
        self, mechanism: GaussianSum, sums: dict[str, torch.Tensor], round_: int
    ) -> dict[str, torch.Tensor]:
        self._ledger.charge(mechanism.event(self._region, round_))
        stream = self._randomness(mechanism.release, self._config.seed, round_, self._region)
        return mechanism.noised(sums, stream)

    def _spent(self, population: str) -> float:
        spent = self._ledger.epsilon(population)
        return spent if spent != float("inf") else -1.0

    def _noise_stds(self, state: RegionState) -> dict[str, float]:
        batch = self._expected_batch(state)
        return {part.name: part.noise_std / batch for part in self._plan.update.parts}

    def _expected_batch(self, state: RegionState) -> float:
        return self._config.sampling_rate * state.examples

    def _state_before(self, request: RegionTrain | RegionPersonalise) -> RegionState:
        """Return the state that a round starts from, releasing the region's size if it is new."""
        if not self._nodes:
            self._nodes = await_nodes(
                self._grid,
                self._devices,
                self._config.join_timeout,
                f"region {self._region}",
            )
        # From the disk each time: the server may ask for a round again after going back one.
        return self._states.load(request.round - 1) or self._first_state(request)

    def _first_state(self, request: RegionTrain | RegionPersonalise) -> RegionState:
        """Release the region's size, once."""
        total = torch.zeros(1)
        answered = 0
        for reply in self._ask(ProfileRequest(layout=request.layout), ProfileReply, {}):
            total += reply.examples
            answered += 1
        self._require_answers(answered)
        examples = float(self._release(self._plan.size, {"size": total}, 0)["size"])
        state = RegionState(0, torch.zeros_like(request.theta), 1.0, 1.0, examples)
        self._states.save(state)
        return state

    def _require_answers(self, answered: int) -> None:
        if not answered:
            raise RunError(f"region {self._region}: none of {len(self._nodes)} devices answered.")
