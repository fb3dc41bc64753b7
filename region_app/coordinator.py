"""The regional coordinator: has its devices' replies summed and noised once, personalises.

It knows its devices only through Flower's `Grid`, so it is the same in simulation and in
deployment. What it returns has been noised, charged to the ledger and saved, in the order
ledger -> noise -> save -> return: a crash in between can waste privacy but never leak it.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid

from region_app.exchange import await_nodes, exchange
from region_app.rho import best_rho, bracket, possible_points
from region_app.secure_sum import SecureSum
from region_app.state import RegionState, StateFolder
from region_app.summation import CentralSum, Devices, Question, Summation, Sums
from regionfed.config import Config
from regionfed.conflict import conflict, label_divergence, personalisation_weight
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
    RegionPersonalise,
    RegionScores,
    RegionTrain,
    RegionUpdate,
    ScoreReply,
    ScoreRequest,
)
from regionfed.errors import PrivacyError, RunError
from regionfed.personaliser import Personaliser, Query, Released
from regionfed.privacy.banded import carried, single
from regionfed.privacy.ledger import Ledger
from regionfed.privacy.mechanism import GaussianSum
from regionfed.privacy.plan import (
    SURE,
    TRAIN,
    PrivacyPlan,
    adapts,
    evaluates,
    personalises,
    score_columns,
    searches_rho,
)
from regionfed.randomness import derive_seed

log = logging.getLogger(__name__)

SUMMATIONS: Mapping[str, Callable[[Devices, Config], Summation]] = {
    "off": CentralSum,
    "pairwise": SecureSum,
}
"""What the setting secure-aggregation names."""


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

    Raises
    ------
    PrivacyError
        If the ledger is older than the state beside it: it was lost, or put back.
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
        self._require_whole_ledger(folder)
        self._nodes: list[int] = []
        known = Devices(region, grid, devices, self._ledger, self._quarantine, folder)
        self._sums = SUMMATIONS[config.secure_aggregation](known, config)

    def _require_whole_ledger(self, folder: Path) -> None:
        """Refuse to go on from a state whose releases the ledger does not know."""
        state = self._states.newest()
        known = max((event.round for event in self._ledger.events), default=-1)
        if state > known:
            raise PrivacyError(
                f"{folder}: the state is of round {state}, the ledger ends at round "
                f"{known if known >= 0 else 'none'}. Restore ledger.jsonl: without it epsilon "
                f"would be understated. Or start a new run."
            )

    # ------------------------------------------------------------------------------ train
    def train(self, request: RegionTrain) -> RegionUpdate:
        """Return the region's noised update at theta + alpha_r theta_r.

        Raises
        ------
        RunError
            If no device answered of all that were asked, or the region holds no data: it sits the
            round out.
        PrivacyError
            If the release would exceed the budget.
        """
        state = self._state_before(request)
        tensors, _ = self._update_of(request.round) or self._release_update(request, state)
        std = self._noise_stds(state)
        return RegionUpdate(
            region=self._region,
            update=tensors["update"],
            sketch=tensors.get("sketch", torch.zeros(0)),
            loss=float(tensors["loss"]),
            examples=state.examples,
            update_noise_std=std["update"],
            sketch_noise_std=std.get("sketch", 0.0),
            epsilon=self._spent(),
            histogram=state.histogram,
        )

    def _update_of(self, round_: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        return self._states.load_release("update", round_)

    def _release_update(
        self, request: RegionTrain, state: RegionState
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        least = max(1.0, SURE * self._sums.noise_std(self._plan.size.part("size"), 1))
        if not self._plan.unit.declared and state.examples < least:
            # Its noised size cannot be told from that of a region without any data.
            raise RunError(
                f"region {self._region} has no data, or too little: its noised size is below "
                f"{least:g}. It sits out; a lower size-noise-multiplier admits smaller regions."
            )
        size = self._plan.sketch_size
        point = request.theta
        if self._personaliser.accumulates:
            point = point + state.own_part()
        mechanism = self._plan.update
        asked = self._gradient_request(mechanism, request, point, sketch_size=size)
        parts = {"total": "update", "loss": "loss"} | ({"sketch": "sketch"} if size else {})
        update = self._released_means(mechanism, asked, parts, state)
        # The noise is kept beside what it is on: whoever reads the update needs to know.
        facts = {"noise_std": self._noise_on_update(state, request.round)}
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
        state = replace(before, round=request.round, alpha=alpha)
        if self._personaliser.accumulates or personalises(config, request.round):
            facts = Released(
                round=request.round,
                update=own["update"],
                global_update=request.global_update,
                theta=request.theta,
                previous=before.direction,
                noise_std=self._noise_stds(before)["update"],
                conflict=d,
                median_conflict=request.median_conflict,
                divergence=label_divergence(before.histogram, request.global_histogram),
                examples=before.examples,
                mean_examples=request.mean_examples,
            )
            proposal = self._personaliser.propose(facts, self._query(request, before))
            state = replace(
                state,
                direction=proposal.direction,
                strategy=proposal.strategy,
                reason=proposal.reason,
            )
        anew = not self._personaliser.accumulates
        if self._personaliser.searches_rho and searches_rho(config, request.round, anew=anew):
            state = self._search_rho(request, state)
        if adapts(config, request.round):
            self._adapt(request, own["update"], state)
        scores = [0.0] * (score_columns(config, request.round) * len(self._tasks))
        scored = evaluates(config, request.round)
        if scored:
            scores = self._score(request, state)
        answer = RegionScores(
            region=self._region,
            strategy=state.strategy,
            reason=state.reason,
            scored=scored,
            conflict=d,
            alpha=alpha,
            rho=state.rho,
            epsilon=self._spent(),
            scores=scores,
            rho_evaluations=state.rho_evaluations,
            rho_messages=state.rho_messages,
        )
        # The state first: after a crash in between the round is done again, from what is kept.
        self._states.save(state)
        self._states.save_release("scores", request.round, {}, asdict(answer))
        return answer

    def _squared_distance(self, own: dict[str, torch.Tensor], request: RegionPersonalise) -> float:
        if self._plan.sketch_size:
            difference = own["sketch"] - request.global_sketch
        else:
            difference = own["update"] - request.global_update
        return float(difference.square().sum())

    def _query(self, request: RegionPersonalise, state: RegionState) -> Query:
        """Return what a personaliser asks for gradients with, in this round."""
        asked = 0

        def query(point: torch.Tensor, inner_step: float = 0.0) -> torch.Tensor:
            nonlocal asked
            asked += 1
            if asked > self._plan.queries:
                raise PrivacyError(
                    f"personaliser='{self._config.personaliser}' asks for more gradients than the "
                    f"{self._plan.queries} that it states and that noise was planned for."
                )
            name = f"query-{asked}"
            if (saved := self._states.load_release(name, request.round)) is not None:
                return saved[0]["gradient"]
            mechanism = self._plan.query
            further = self._gradient_request(
                mechanism, request, point, query=asked, inner_step=inner_step
            )
            released = self._released_means(mechanism, further, {"total": "gradient"}, state)
            self._states.save_release(name, request.round, released, {})
            return released["gradient"]

        return query

    def _search_rho(self, request: RegionPersonalise, state: RegionState) -> RegionState:
        """Return the state at the best rho, with what the search has cost."""
        config = self._config
        published = config.rho_search == "published"
        low, high = bracket(0.0 if published else state.rho, config.rho_high)
        points = possible_points(low, high, config.rho_evaluations)
        votes = self._votes(request, state, points)
        return replace(
            state,
            rho=best_rho(points, votes, low, high, config.rho_evaluations, zero=not published),
            rho_evaluations=state.rho_evaluations + len(points),
            rho_messages=state.rho_messages + self._devices,
        )

    def _votes(
        self, request: RegionPersonalise, state: RegionState, points: list[float]
    ) -> list[float]:
        """Return the noised losses at the points along the line, relative to its start."""
        if (saved := self._states.load_release("votes", request.round)) is not None:
            return [float(v) for v in saved[0]["vote"]]
        mechanism = self._plan.vote
        asked = LossRequest(
            round=request.round,
            layout=request.layout,
            sampling_rate=mechanism.sampling.examples,
            period=mechanism.sampling.period,
            clip_norm=mechanism.part("vote").clip,
            steps=points,
            base=request.theta,
            direction=state.alpha * state.direction,
            as_one=self._plan.unit.as_one,
        )
        batch = self._expected_batch(mechanism, state)
        released = self._released(
            Question(
                request=asked,
                reply=LossReply,
                dimensions={"steps": len(points)},
                mechanism=mechanism,
                parts={"differences": "vote"},
                round=request.round,
                charged_to=request.round,
                batch=lambda _: batch,
            )
        )
        self._states.save_release("votes", request.round, released, {})
        return [float(v) for v in released["vote"]]

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
            update_noise_std=self._noise_on_update(state, request.round),
            personalised=request.theta + state.own_part(),
            update=update,
        )
        done = sum(
            1
            for _ in exchange(
                self._grid,
                self._nodes,
                asked,
                AdaptReply,
                {},
                timeout=config.device_timeout,
                quarantine=self._quarantine,
            )
        )
        log.info("region %s: %d of %d devices adapted", self._region, done, len(self._nodes))

    def _score(self, request: RegionPersonalise, state: RegionState) -> list[float]:
        if (saved := self._states.load_release("score-sums", request.round)) is not None:
            return [float(v) for v in saved[0]["scores"]]
        columns = score_columns(self._config, request.round)
        asked = ScoreRequest(
            round=request.round,
            layout=request.layout,
            with_user=columns == 4,
            theta=request.theta,
            personalised=request.theta + state.own_part(),
            as_one=self._plan.unit.as_one,
        )

        def held(sums: Sums) -> float:
            # Never told: only a clipped mean is over it.
            return max(float(sums["scores"][::columns].sum()), 1.0)

        mechanism = self._plan.scores
        released = self._released(
            Question(
                request=asked,
                reply=ScoreReply,
                dimensions={"columns*tasks": columns * len(self._tasks)},
                mechanism=mechanism,
                parts={"scores": "scores"},
                round=request.round,
                charged_to=request.round,
                batch=held,
            )
        )
        # Sums again where a mean was noised, of as many examples as are declared.
        declared = state.examples
        released["scores"].mul_(declared / mechanism.part("scores").divisor(declared))
        self._states.save_release("score-sums", request.round, released, {})
        return [float(v) for v in released["scores"]]

    # -------------------------------------------------------------------------- gradients
    def _gradient_request(
        self,
        mechanism: GaussianSum,
        request: RegionTrain | RegionPersonalise,
        point: torch.Tensor,
        *,
        sketch_size: int = 0,
        query: int = 0,
        inner_step: float = 0.0,
    ) -> GradientRequest | DeltaRequest:
        """Return what to ask devices: their examples' gradients, or what their steps change.

        Clip and rate are the mechanism's, so that no device is asked for anything but what is
        accounted.
        """
        config, unit = self._config, self._plan.unit
        asked: dict[str, Any] = {
            "round": request.round,
            "layout": request.layout,
            "point": point,
            "sketch_size": sketch_size,
            "query": query,
            "clip_norm": unit.device_clip(mechanism.parts[0].clip),
            "loss_cap": self._plan.update.part("loss").clip,
            "sketch_seed": derive_seed(config.seed, "sketch"),
        }
        if not unit.as_one:
            drawn = mechanism.sampling
            return GradientRequest(
                **asked,
                sampling_rate=drawn.examples,
                period=drawn.period,
                inner_step=inner_step,
            )
        if inner_step:
            raise PrivacyError("a device as one takes no step of each example's: set meta-order=1.")
        return DeltaRequest(
            **asked,
            steps=config.client_steps,
            learning_rate=config.client_lr,
            optimiser=config.client_optimiser,
        )

    def _released_means(
        self,
        mechanism: GaussianSum,
        asked: GradientRequest | DeltaRequest,
        parts: Mapping[str, str],
        state: RegionState,
    ) -> Sums:
        """Return the noised means of gradients (p,), sketches (k,) and losses (1,), by part.

        The divisor is fixed: the realised count would be a second, unaccounted release.
        """
        batch = self._expected_batch(mechanism, state)
        noised = self._released(
            Question(
                request=asked,
                reply=GradientReply,
                dimensions={"p": len(asked.point), "k": asked.sketch_size},
                mechanism=mechanism,
                parts=parts,
                round=asked.round,
                charged_to=asked.round,
                number=asked.query,
                batch=lambda _: batch,
                must_answer=True,
            )
        )
        return {name: v.div_(mechanism.part(name).divisor(batch)) for name, v in noised.items()}

    # ----------------------------------------------------------------------------- common
    def _released(self, question: Question) -> Sums:
        return self._sums.released(self._nodes, question)

    def _quarantine(self, reason: str) -> None:
        # Stays in the region's own log: which device failed, and why, is nobody else's business.
        log.warning("region %s: %s", self._region, reason)

    def _spent(self) -> float:
        spent = self._ledger.epsilon(TRAIN)
        return spent if spent != float("inf") else -1.0

    def _noise_stds(self, state: RegionState) -> dict[str, float]:
        """Return the noise on each part, by which steps are cut: of updates, what sums carry."""
        batch = self._expected_batch(self._plan.update, state)
        mechanism = self._plan.update
        lengths = {"update": len(state.direction), "sketch": self._plan.sketch_size}
        std = {
            part.name: self._sums.noise_std(part, lengths.get(part.name, 1)) / part.divisor(batch)
            for part in mechanism.parts
        }
        return std | {"update": std["update"] * carried(self._config.rounds, mechanism.bands)}

    def _noise_on_update(self, state: RegionState, round_: int) -> float:
        """Return the noise (std) on a coordinate of one round's update."""
        rounds, bands = self._config.rounds, self._plan.update.bands
        share = single(rounds, bands, round_) / carried(rounds, bands)
        return self._noise_stds(state)["update"] * share

    def _expected_batch(self, mechanism: GaussianSum, state: RegionState) -> float:
        """Return how many units a sample is expected to have."""
        return mechanism.sampling.share * self._plan.unit.population(state.examples, self._devices)

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
        """Return the state before round 1: with the region's size, as declared or as released."""
        sizes = self._sizes(request) if self._plan.sizes else {}
        declared = float(self._devices * self._config.examples_per_client)
        state = RegionState(
            round=0,
            direction=torch.zeros_like(request.theta),
            rho=1.0,
            alpha=1.0,
            examples=float(sizes["size"]) if sizes else declared,
            histogram=[float(v) for v in sizes.get("labels", ())],
        )
        self._states.save(state)
        return state

    def _sizes(self, request: RegionTrain | RegionPersonalise) -> Sums:
        """Release the region's size, and its labels where they are needed, once."""
        mechanism, labels = self._plan.size, self._plan.labels
        most = int(mechanism.part("size").clip) if self._plan.unit.as_one else 0
        return self._released(
            Question(
                request=ProfileRequest(layout=request.layout, labels=labels, most=most),
                reply=ProfileReply,
                dimensions={"labels": labels},
                mechanism=mechanism,
                parts={"examples": "size"} | ({"histogram": "labels"} if labels else {}),
                round=request.round,
                charged_to=0,
                must_answer=True,
            )
        )
