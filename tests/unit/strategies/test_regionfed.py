"""The Strategy: one noised update per region in, one model out, no reply believed blindly."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from regionfed.config import Config
from regionfed.conflict import noise_floor
from regionfed.contract import (
    RegionPersonalise,
    RegionScores,
    RegionTrain,
    RegionUpdate,
    decode,
    encode,
)
from regionfed.errors import RunError
from regionfed.records import RoundRecord
from regionfed.vector import from_arrays, to_arrays
from server_app.in_process_grid import InProcessGrid, Node
from strategies.optimisers import Momentum
from strategies.regionfed import RegionFed, ServerState
from tests.conftest import RUN_ID, Forgetful, context_of, part, tiny_config

P, K = 4, 8
THETA = torch.linspace(-1.0, 1.0, P)
NAMES = {1: "North", 2: "South", 3: "West"}
TASKS = ("intent", "spelling")


def update(region: str, value: float, **fields: Any) -> RegionUpdate:
    base = RegionUpdate(
        region=region,
        update=torch.full((P,), value),
        sketch=torch.full((K,), value),
        loss=value,
        examples=100.4,
        update_noise_std=0.0,
        sketch_noise_std=0.0,
        epsilon=1.0,
    )
    return replace(base, **fields)


def scores(region: str, **fields: Any) -> RegionScores:
    base = RegionScores(
        region=region,
        strategy="residual",
        reason="because",
        scored=False,
        conflict=1.0,
        alpha=0.75,
        rho=1.5,
        epsilon=2.0,
        scores=[0.0] * 6,
    )
    return replace(base, **fields)


Answer = Callable[[Any], Any]


@dataclass
class Region:
    """A fake region: what it answers, and what it was told."""

    name: str
    train: Answer
    personalise: Answer
    heard: list[Any] = field(default_factory=list)

    def node(self) -> Node:
        app = ClientApp()

        def reply(message: Message, request: Any, answer: Answer) -> Message:
            self.heard.append(request)
            content = answer(request)
            records = content if isinstance(content, RecordDict) else encode(content)
            return Message(records, reply_to=message)

        @app.train()
        def train(message: Message, context: Context) -> Message:
            return reply(message, decode(RegionTrain, message.content, {}), self.train)

        @app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            request = decode(RegionPersonalise, message.content, {})
            return reply(message, request, self.personalise)

        return Node(app, context_of(0))


def region(name: str, value: float, **fields: Any) -> Region:
    return Region(name, lambda _: update(name, value, **fields), lambda _: scores(name))


def three(*values: float) -> list[Region]:
    return [region(n, v) for n, v in zip(NAMES.values(), values or (1.0, 2.0, 6.0), strict=True)]


@dataclass
class Run:
    """What came of a run of fake regions."""

    strategy: RegionFed
    records: list[RoundRecord]
    states: list[ServerState]


def run(
    regions: list[Region],
    *,
    config: Config | None = None,
    rounds: int = 1,
    theta: torch.Tensor = THETA,
    resume: ServerState | None = None,
    momentum: float = 0.0,
) -> Run:
    config = config or tiny_config(regions=3, rounds=rounds)
    grid = InProcessGrid({i: r.node() for i, r in enumerate(regions, 1)}, RUN_ID)
    records: list[RoundRecord] = []
    states: list[ServerState] = []

    def observe(record: RoundRecord, state: ServerState) -> None:
        records.append(record)
        states.append(state)

    strategy = RegionFed(
        config,
        Momentum(config.server_lr, momentum),
        NAMES,
        TASKS,
        "layout",
        sketch_size=K,
        observers=[observe],
        resume=resume,
    )
    arrays = ArrayRecord(to_arrays("theta", theta))
    result = Run(strategy, records, states)
    strategy.start(grid, arrays, num_rounds=rounds)
    return result


# -------------------------------------------------------------------------------------- train
def test_theta_moves_against_the_mean_of_the_updates() -> None:
    """Equal weights: theta - lr * mean; every region is asked at theta."""
    regions = three()
    done = run(regions, config=tiny_config(regions=3, server_lr=0.5))
    assert torch.allclose(done.states[0].theta, THETA - 0.5 * 3.0)
    for one in regions:
        asked = one.heard[0]
        assert isinstance(asked, RegionTrain) and asked.round == 1 and asked.layout == "layout"
        assert torch.equal(asked.theta, THETA)
    assert done.records[0].answered == ["North", "South", "West"]
    assert done.records[0].loss == pytest.approx(3.0)
    assert done.records[0].epsilon == 2.0  # what personalising cost is in it


def test_the_next_round_starts_from_the_new_theta() -> None:
    """And so on, round by round."""
    regions = three()
    run(regions, rounds=3)
    trained = [r.theta for r in regions[0].heard if isinstance(r, RegionTrain)]
    assert [torch.allclose(t, THETA - 3.0 * i) for i, t in enumerate(trained)] == [True] * 3


def test_regions_hear_the_model_the_mean_and_the_measure() -> None:
    """In the second message: theta after the step, mean update and sketch, median and spread."""
    regions = three(1.0, 2.0, 6.0)
    run(regions)
    told = regions[0].heard[1]
    assert isinstance(told, RegionPersonalise)
    assert torch.allclose(told.theta, THETA - 3.0)
    assert torch.allclose(told.global_update, torch.full((P,), 3.0))
    assert torch.allclose(told.global_sketch, torch.full((K,), 3.0))
    # ||(v - 3) 1|| over K coordinates, for v of 1, 2 and 6
    distances = [abs(v - 3.0) * K**0.5 for v in (1.0, 2.0, 6.0)]
    assert told.median_conflict == pytest.approx(sorted(distances)[1])
    middle = sorted(distances)[1]
    assert told.conflict_spread == pytest.approx(sum(abs(d - middle) for d in distances) / 3)


def test_the_measure_is_taken_in_the_first_round_only() -> None:
    """alpha compares with round 1, whatever comes later."""
    first = three(1.0, 2.0, 6.0)
    first[0].train = lambda r: update("North", 1.0 if r.round == 1 else 100.0)
    run(first, rounds=2)
    told = [r for r in first[0].heard if isinstance(r, RegionPersonalise)]
    assert told[0].median_conflict == told[1].median_conflict
    assert told[0].conflict_spread == told[1].conflict_spread


@pytest.mark.parametrize("conflict", ["sketch", "debiased", "raw"])
def test_each_region_is_told_its_own_noise_floor(conflict: str) -> None:
    """From the declared noise levels of all who took part, in the dimension of the measure."""
    stds = [0.5, 1.0, 2.0]
    regions = [
        region(n, 1.0, update_noise_std=s, sketch_noise_std=10.0 * s)
        for n, s in zip(NAMES.values(), stds, strict=True)
    ]
    run(regions, config=tiny_config(regions=3, conflict=conflict))
    scale, dimensions = (10.0, K) if conflict == "sketch" else (1.0, P)
    for i, one in enumerate(regions):
        expected = noise_floor(dimensions, [scale * s for s in stds], [1 / 3] * 3, i)
        assert one.heard[1].noise_floor == pytest.approx(expected)


def test_messages_are_lists_and_one_per_region() -> None:
    """A7: Flower's grid iterates more than once; each receiver has records of its own."""
    strategy = RegionFed(
        tiny_config(regions=3), Momentum(1.0, 0.0), NAMES, TASKS, "layout", sketch_size=K
    )
    grid = InProcessGrid({}, RUN_ID)
    arrays = ArrayRecord(to_arrays("theta", THETA))
    messages = strategy.configure_train(1, arrays, ConfigRecord(), grid)
    assert isinstance(messages, list)
    assert [m.metadata.dst_node_id for m in messages] == [1, 2, 3]
    for record in ("config", "arrays"):
        assert len({id(part(m.content, record)) for m in messages}) == 3
    # What is immutable is there once, however many regions there are.
    assert len({id(part(m.content, "arrays")["theta/0"].data) for m in messages}) == 1
    assert {m.metadata.ttl for m in messages} == {600.0}


def test_averaging_smooths_what_is_deployed_and_not_what_is_trained() -> None:
    """theta is trained; the average is what regions personalise and what is kept for use."""
    regions = three()
    done = run(regions, config=tiny_config(regions=3, averaging=0.9), rounds=3)
    thetas = [THETA, *(s.theta for s in done.states)]
    assert torch.allclose(thetas[3], THETA - 9.0)
    average = THETA
    for round_, theta in enumerate(thetas[1:], 1):
        decay = min(0.9, (1.0 + round_) / (10.0 + round_))
        average = decay * average + (1.0 - decay) * theta
    assert torch.allclose(done.states[-1].average, average, atol=1e-5)
    assert torch.allclose(regions[0].heard[-1].theta, average, atol=1e-5)


def test_without_averaging_theta_is_deployed() -> None:
    """The default."""
    done = run(three(), rounds=2)
    assert torch.equal(done.states[-1].average, done.states[-1].theta)


def test_epsilon_of_the_round_is_the_largest_of_the_regions() -> None:
    """Regions hold different people; where one has no privacy, none is claimed."""
    some = [region(n, 1.0, epsilon=e) for n, e in zip(NAMES.values(), (0.5, 2.5, 1.0), strict=True)]
    assert run(some).records[0].epsilon == 2.5
    spent = {name: r.epsilon for name, r in run(some).records[0].regions.items()}
    assert spent == dict(zip(NAMES.values(), (2.0, 2.5, 2.0), strict=True))
    off = [region(n, 1.0, epsilon=e) for n, e in zip(NAMES.values(), (0.5, -1.0, 1.0), strict=True)]
    assert run(off).records[0].epsilon is None


def test_what_a_region_spends_after_its_update_counts_in_that_round() -> None:
    """Votes and further gradients are charged when the update has left: the scores tell of them."""
    some = three()
    some[1].personalise = lambda _: scores("South", epsilon=3.25)
    assert run(some).records[0].epsilon == 3.25


def test_what_a_silent_region_has_spent_stays_spent() -> None:
    """It said so before it went; a round that nobody answers does not bring epsilon down."""
    some = three()
    some[2].personalise = lambda _: scores("West", epsilon=3.5)
    for one in some:
        answer = one.train
        one.train = lambda r, answer=answer: answer(r) if r.round == 1 else crash(r)
    done = run(some, rounds=2, config=tiny_config(regions=3, rounds=2, max_failed_rounds=9))
    assert [r.epsilon for r in done.records] == [3.5, 3.5]


# --------------------------------------------------------------------------- what goes wrong
def crash(_: Any) -> Any:
    raise ValueError("the region is on fire")


def tampered(name: str, **arrays: torch.Tensor) -> Answer:
    def answer(_: Any) -> RecordDict:
        records = encode(update(name, 100.0))
        for key, value in arrays.items():
            part(records, "arrays")[f"{key}/0"] = Array(value.numpy())
        return records

    return answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (crash, "the region is on fire"),
        (tampered("South", update=torch.tensor([1.0, float("nan"), 0.0, 0.0])), "nan or inf"),
        (tampered("South", update=torch.zeros(1, P)), "one axis"),
        (tampered("South", update=torch.zeros(P - 1)), "expected 4 elements, got 3"),
        (tampered("South", update=torch.zeros(1)), "expected 4 elements, got 1"),
        (tampered("South", sketch=torch.zeros(K + 1)), "expected 8 elements, got 9"),
        (lambda _: update("North", 100.0), "calls itself 'North'"),
        (lambda _: scores("South"), "RegionUpdate"),
    ],
)
def test_a_reply_that_is_not_sound_does_not_count(answer: Answer, reason: str) -> None:
    """A4, A5: the mean is that of the others, and the record says who and why."""
    regions = three(1.0, 99.0, 3.0)
    regions[1].train = answer
    done = run(regions)
    assert torch.allclose(done.states[0].theta, THETA - 2.0)
    assert done.records[0].answered == ["North", "West"]
    (failure,) = done.records[0].failures
    assert failure.region == "South" and failure.round == 1 and reason in failure.reason
    assert len(regions[1].heard) == 1  # not asked to personalise what it did not train


@pytest.mark.parametrize("round_", [1, 2])
def test_a_region_without_the_sketch_that_others_send_does_not_end_the_run(round_: int) -> None:
    """A5: no sketch is another key set: the region is left out, or measured without it."""
    regions = three(1.0, 2.0, 6.0)
    regions[1].train = lambda r: update(
        "South", 2.0, **({"sketch": torch.zeros(0)} if r.round == round_ else {})
    )
    done = run(regions, rounds=2)
    assert len(done.records) == 2
    assert {"North", "West"} <= set(done.records[round_ - 1].answered)


def test_a_region_that_says_nothing_is_named() -> None:
    """F5: no answer within the time limit."""
    regions = three()

    class Deaf(InProcessGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
            replies = list(super().send_and_receive(messages))
            return [r for r in replies if r.metadata.src_node_id != 2]

    strategy = RegionFed(
        tiny_config(regions=3), Momentum(1.0, 0.0), NAMES, TASKS, "layout", sketch_size=K
    )
    grid = Deaf({i: r.node() for i, r in enumerate(regions, 1)}, RUN_ID)
    arrays = ArrayRecord(to_arrays("theta", THETA))
    messages = strategy.configure_train(1, arrays, ConfigRecord(), grid)
    new, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert new is not None
    assert torch.allclose(from_arrays("theta", new, P), THETA - 3.5)
    (failure,) = strategy._failures
    assert failure.region == "South" and "silent for 600 s" in failure.reason


def test_order_of_arrival_and_repeats_do_not_matter() -> None:
    """F7: bit for bit; of two replies of a region the first counts."""
    generator = torch.Generator().manual_seed(0)
    vectors = dict(zip(NAMES.values(), torch.randn(3, P, generator=generator), strict=True))

    def outcome(order: list[int]) -> torch.Tensor:
        regions = [region(n, 1.0, update=vectors[n]) for n in NAMES.values()]
        grid = InProcessGrid({i: r.node() for i, r in enumerate(regions, 1)}, RUN_ID)
        strategy = RegionFed(
            tiny_config(regions=3), Momentum(1.0, 0.0), NAMES, TASKS, "layout", sketch_size=K
        )
        arrays = ArrayRecord(to_arrays("theta", THETA))
        messages = strategy.configure_train(1, arrays, ConfigRecord(), grid)
        replies = list(grid.send_and_receive(messages))
        new, _ = strategy.aggregate_train(1, [replies[i] for i in order])
        assert new is not None
        return from_arrays("theta", new, P)

    expected = outcome([0, 1, 2])
    for order in ([2, 1, 0], [1, 2, 0], [0, 0, 1, 2, 2]):
        assert torch.equal(outcome(order), expected)


def test_too_few_regions_leave_theta_as_it_is() -> None:
    """Below min-regions a round does not count, and nobody personalises."""
    regions = three()
    regions[0].train = regions[1].train = crash
    config = tiny_config(regions=3, min_regions=2, max_failed_rounds=2)
    with pytest.raises(RunError, match=r"2 rounds in a row .*min-regions=2.*on fire"):
        run(regions, config=config, rounds=5)
    assert all(isinstance(r, RegionTrain) for one in regions for r in one.heard)
    assert all(torch.equal(r.theta, THETA) for r in regions[2].heard)


def test_a_failed_round_is_recorded_and_the_run_goes_on() -> None:
    """F6: only failed rounds in a row end a run; the count starts again after a good one."""
    regions = three()

    def moody(request: RegionTrain) -> RegionUpdate:
        if request.round in (1, 2, 4, 5):
            raise ValueError("asleep")
        return update("North", 1.0)

    for one in regions:
        one.train = moody
    regions[1].train = regions[2].train = crash
    config = tiny_config(regions=3, min_regions=1, max_failed_rounds=3)
    done = run(regions, config=config, rounds=6)
    assert [len(r.answered) for r in done.records] == [0, 0, 1, 0, 0, 1]
    assert [len(r.failures) for r in done.records] == [3, 3, 2, 3, 3, 2]
    assert done.records[0].loss is None and done.records[0].epsilon is None
    assert torch.allclose(done.states[-1].theta, THETA - 2.0)
    assert torch.equal(done.states[1].theta, THETA)


def test_a_region_that_trains_but_does_not_personalise_is_a_failure_only() -> None:
    """Its update counted already."""
    regions = three()
    regions[1].personalise = crash
    done = run(regions)
    assert torch.allclose(done.states[0].theta, THETA - 3.0)
    assert [f.region for f in done.records[0].failures] == ["South"]
    assert done.records[0].regions["South"].alpha is None
    assert done.records[0].regions["North"].alpha == 0.75


# -------------------------------------------------------------------------------- evaluation
def test_scores_become_means_over_examples_and_tasks() -> None:
    """Per task (count, global, personalised); the worst region is the robustness score."""
    regions = three()
    regions[0].personalise = lambda _: scores(
        "North", scored=True, scores=[10.0, 5.0, 8.0, 4.0, 1.0, 2.0]
    )
    regions[1].personalise = lambda _: scores(
        "South", scored=True, scores=[10.0, 1.0, 3.0, 0.0, 0.0, 0.0]
    )
    done = run(regions)
    north, south = (done.records[0].regions[n] for n in ("North", "South"))
    assert north.global_ == {"intent": 0.5, "spelling": 0.25, "mean": 0.375}
    assert north.personalised == {"intent": 0.8, "spelling": 0.5, "mean": 0.65}
    assert south.personalised == {"intent": 0.3, "spelling": None, "mean": 0.3}
    record = done.records[0]
    assert record.personalised is not None and record.global_ is not None
    assert record.personalised.mean == pytest.approx((0.65 + 0.3) / 2)
    assert record.personalised.rrs == pytest.approx(0.3)
    assert record.personalised.worst == "South"
    assert record.regions["West"].personalised is None
    assert (north.conflict, north.alpha, north.rho) == (1.0, 0.75, 1.5)
    assert (north.strategy, north.reason, north.examples) == ("residual", "because", 100)


def test_noise_cannot_make_a_score_leave_its_range() -> None:
    """A noised sum may be negative, or above its count; a count may be nothing."""
    regions = three()
    regions[0].personalise = lambda _: scores(
        "North", scored=True, scores=[10.0, -5.0, 12.0, -3.0, 1.0, 2.0]
    )
    done = run(regions)
    north = done.records[0].regions["North"]
    assert north.global_ == {"intent": 0.0, "spelling": None, "mean": 0.0}
    assert north.personalised == {"intent": 1.0, "spelling": None, "mean": 1.0}


def test_a_round_without_evaluation_has_no_score() -> None:
    """But keeps what is known of the regions from the last one."""
    regions = three()
    regions[0].personalise = lambda r: scores(
        "North", scored=r.round == 1, scores=[10.0, 5.0, 8.0, 4.0, 1.0, 2.0]
    )
    done = run(regions, rounds=2)
    assert done.records[0].personalised is not None
    assert done.records[1].personalised is None and done.records[1].global_ is None
    assert done.records[1].regions["North"].personalised is not None


@pytest.mark.parametrize("numbers", [[], [1.0] * 5, [1.0] * 7])
def test_scores_of_another_number_of_tasks_are_refused(numbers: list[float]) -> None:
    """A5: three numbers per task."""
    regions = three()
    regions[0].personalise = lambda _: scores("North", scored=True, scores=numbers)
    done = run(regions)
    (failure,) = done.records[0].failures
    assert failure.region == "North" and "expected 6 numbers" in failure.reason


# -------------------------------------------------------------------------------------- resume
def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    """Same thetas as a run that was never interrupted; rounds are not repeated."""
    config = tiny_config(regions=3, averaging=0.5)
    straight = run(three(), config=config, rounds=5, momentum=0.9)
    first = run(three(), config=config, rounds=2, momentum=0.9)
    state = first.states[-1]
    regions = three()
    second = run(regions, config=config, rounds=5, theta=state.theta, resume=state, momentum=0.9)
    assert [r.round for r in second.records] == [3, 4, 5]
    assert torch.equal(second.states[-1].theta, straight.states[-1].theta)
    assert torch.equal(second.states[-1].average, straight.states[-1].average)
    assert second.states[-1].centre == straight.states[-1].centre
    told = [r for r in regions[0].heard if isinstance(r, RegionPersonalise)]
    assert told[0].median_conflict == straight.states[0].centre


def test_what_is_held_while_regions_personalise_does_not_grow_with_them() -> None:
    """Their updates have been used by then; what they are told is there once."""
    size = 4321  # no other vector is as long

    def held(count: int) -> int:
        found: list[int] = []

        def personalise(_: Any) -> RegionScores:
            gc.collect()
            things = gc.get_objects()
            vectors = [t for t in things if type(t) is torch.Tensor and t.numel() == size]
            arrays = [a for a in things if type(a) is Array and a.shape == (size,)]
            storages = {t.untyped_storage().data_ptr() for t in vectors}
            found.append(len(storages) + len({id(a.data) for a in arrays}))
            return scores("1")

        names = {i: str(i) for i in range(1, count + 1)}
        regions = [
            Region(
                name,
                lambda _, name=name: update(name, 1.0, update=torch.ones(size)),  # type: ignore[misc]
                personalise if name == "1" else lambda _, name=name: scores(name),  # type: ignore[misc]
                Forgetful(),
            )
            for name in names.values()
        ]
        strategy = RegionFed(
            tiny_config(regions=count), Momentum(1.0, 0.5), names, TASKS, "x", sketch_size=K
        )
        grid = InProcessGrid({i: r.node() for i, r in enumerate(regions, 1)}, RUN_ID)
        strategy.start(grid, ArrayRecord(to_arrays("theta", torch.ones(size))), num_rounds=1)
        return found[0]

    few, many = held(2), held(6)
    assert 0 < many == few


def test_a_state_that_an_observer_keeps_does_not_change() -> None:
    """Each round's state is that round's, also its optimiser's."""
    done = run(three(), rounds=3, momentum=0.9)
    short = run(three(), rounds=1, momentum=0.9)
    assert torch.equal(done.states[0].theta, short.states[0].theta)
    for key, value in short.states[0].optimiser.items():
        assert torch.equal(done.states[0].optimiser[key], value), key
