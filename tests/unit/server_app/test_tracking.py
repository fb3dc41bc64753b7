"""What is tracked of a run is what its records hold; no tracker can change or fail a run."""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from regionfed.config import LOCAL, Config
from regionfed.errors import ConfigurationError
from regionfed.records import (
    EvaluationSummary,
    Failure,
    PrivacySummary,
    RegionRecord,
    RoundRecord,
    Score,
    Status,
    Summary,
)
from server_app.run import execute
from server_app.run_folder import plain, read_rounds
from server_app.summary import record_of
from server_app.tracking.measures import OF_REGION, OF_RUN, Measure, measures_of
from server_app.tracking.tracker import (
    EPSILON,
    TRACKERS,
    Tracker,
    Tracking,
    chosen_trackers,
    facts_of,
)
from tests.conftest import tiny_config

CONFIG = tiny_config(rounds=4)
UK = RegionRecord(
    conflict=0.3,
    alpha=0.75,
    rho=1.5,
    epsilon=1.25,
    global_={"intent": 0.4, "mean": 0.5},
    personalised={"intent": 0.6, "mean": 0.75},
)
EVALUATED = RoundRecord(
    1,
    4,
    answered=("UK",),
    failures=(Failure("São Paulo (2)", 1, "no answer within 600 s"),),
    loss=2.5,
    global_=Score(0.5, 0.5, "UK"),
    personalised=Score(0.75, 0.75, "UK"),
    regions={"UK": UK, "São Paulo (2)": replace(UK, alpha=0.5)},
    epsilon=1.5,
    seconds=8.0,
)
SILENT = RoundRecord(
    2,
    4,
    failures=(Failure("São Paulo (2)", 2, "no answer within 600 s"),),
    regions=EVALUATED.regions,
    epsilon=1.75,
    seconds=9.0,
)
THIRD = replace(EVALUATED, round=3, failures=(), loss=float("nan"), epsilon=2.0)


def summary_of(status: Status = "finished") -> Summary:
    return Summary(
        status,
        "",
        3,
        0,
        {},
        {},
        Score(0.5, 0.5),
        Score(0.75, 0.75),
        {},
        PrivacySummary("dp"),
        EvaluationSummary("panel"),
        (),
        25.0,
        {},
    )


# ------------------------------------------------------------------------------ what is tracked
def test_a_round_is_tracked_by_the_numbers_of_its_record() -> None:
    """The mean over tasks; of a region that did not answer, only what is new of it."""
    assert {measure.tag: measure.value for measure in measures_of(EVALUATED)} == {
        "run/loss": 2.5,
        "run/epsilon": 1.5,
        "run/seconds": 8.0,
        "run/answered": 1.0,
        "run/failures": 1.0,
        "run/global_mean": 0.5,
        "run/global_rrs": 0.5,
        "run/personalised_mean": 0.75,
        "run/personalised_rrs": 0.75,
        "epsilon/UK": 1.25,
        "answered/UK": 1.0,
        "failures/UK": 0.0,
        "alpha/UK": 0.75,
        "rho/UK": 1.5,
        "conflict/UK": 0.3,
        "global/UK": 0.5,
        "personalised/UK": 0.75,
        "epsilon/São Paulo (2)": 1.25,
        "answered/São Paulo (2)": 0.0,
        "failures/São Paulo (2)": 1.0,
    }


def test_what_is_unknown_is_no_number() -> None:
    """Neither NaN nor a score of an earlier round."""
    assert "loss" not in {measure.name for measure in measures_of(THIRD)}
    quiet = replace(EVALUATED, global_=None, personalised=None)
    assert {"global", "personalised", "global_mean"}.isdisjoint(m.name for m in measures_of(quiet))
    assert Measure("alpha", 0.75, "UK") in measures_of(quiet)


def test_a_track_says_what_epsilon_means_and_no_path_of_this_machine() -> None:
    """It may be carried elsewhere, and an epsilon alone means nothing."""
    config = tiny_config(run_dir="/somewhere/runs", data_path="/somewhere/data")
    facts = facts_of(config)
    assert facts["server-lr"] == 1.0 and "/somewhere" not in str(facts)
    assert {key.replace("-", "_") for key in facts}.isdisjoint(LOCAL)
    for word in ("delta 1e-05", "example", "add-or-remove-one", "Poisson", "accountant PLD"):
        assert word in str(facts[EPSILON])
    assert facts_of(replace(config, privacy_mode="none"))[EPSILON] == "no privacy was asked for"


def test_every_number_has_a_meaning() -> None:
    user = Score(0.8, 0.7)
    for measure in measures_of(
        replace(EVALUATED, user=user, regions={"UK": replace(UK, user={"mean": 0.8})})
    ):
        assert (OF_REGION if measure.region else OF_RUN)[measure.name]


def test_a_record_is_read_back_whole() -> None:
    """What a resumed run was tracked by before."""
    again = record_of(plain(EVALUATED))
    assert measures_of(again) == measures_of(EVALUATED)


# --------------------------------------------------------------------------------- the setting
def test_nothing_is_tracked_unless_it_is_asked_for() -> None:
    assert Config().tracking == "" and chosen_trackers(Config()) == {}


def test_several_are_named_with_commas() -> None:
    config = replace(CONFIG, tracking=" prometheus, tensorboard,")
    assert list(chosen_trackers(config)) == ["prometheus", "tensorboard"]


def test_a_wrong_name_costs_no_folder(tmp_path: Path) -> None:
    """It names the nearest."""
    config = tiny_config(tracking="tensorbord", run_dir=str(tmp_path / "runs"))
    with pytest.raises(ConfigurationError, match="'tensorbord'; did you mean 'tensorboard'"):
        execute(config)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("prometheus", "prometheus_client"),
        ("tensorboard", "torch.utils.tensorboard"),
        ("mlflow", "mlflow"),
        ("wandb", "wandb"),
    ],
)
def test_a_missing_package_names_the_extra_before_any_round(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loaded in [one for one in sys.modules if one.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"server_app.tracking.{name}", raising=False)
    for variable in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(variable, "true")
    config = tiny_config(tracking=name, run_dir=str(tmp_path / "runs"))
    with pytest.raises(ConfigurationError, match=rf"pip install 'regionfed\[{name}\]'"):
        execute(config)
    assert not (tmp_path / "runs").exists()


def test_it_concerns_one_machine_alone() -> None:
    """World and regions need not agree."""
    assert "tracking" in LOCAL
    assert not CONFIG.disagreements(replace(CONFIG, tracking="prometheus"))


# ---------------------------------------------------------------------------- harmless failures
class Odd:
    """Fails when it is told of a round."""

    def __init__(self, folder: Path, config: Config, earlier: Sequence[RoundRecord]) -> None:
        self.asked: list[int] = []
        ODD.append(self)

    def round(self, record: RoundRecord) -> None:
        self.asked.append(record.round)
        raise OSError("disk full")

    def close(self, summary: Summary) -> None:
        raise AssertionError("it was left out")


ODD: list[Odd] = []


def unopened(folder: Path, config: Config, earlier: Sequence[RoundRecord]) -> Tracker:
    raise OSError("no such server")


def test_one_that_fails_is_told_once_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a real run, which goes on, and so do the other trackers."""
    ODD.clear()
    chosen: dict[str, Any] = {"odd": Odd, "unopened": unopened, **kinds("prometheus")}
    with caplog.at_level(logging.WARNING):
        tracking = Tracking(chosen, tmp_path, CONFIG, ())
        for record in (EVALUATED, SILENT):
            tracking.round(record)
        tracking.close(summary_of())
    assert ODD[0].asked == [1]
    said = [record.getMessage() for record in caplog.records]
    assert [text.split("'")[1] for text in said] == ["unopened", "odd"]
    assert all("the run goes on" in text for text in said) and "disk full" in caplog.text
    assert value(tmp_path, "regionfed_round") == 2.0


# ---------------------------------------------------------------------------------- Prometheus
def kinds(name: str) -> dict[str, Any]:
    return {name: TRACKERS.load(name)}


def samples(folder: Path) -> dict[str, dict[frozenset[str], float]]:
    """Return metrics.prom as Prometheus reads it: by name, then by the values of labels."""
    found: dict[str, dict[frozenset[str], float]] = {}
    for family in text_string_to_metric_families((folder / "metrics.prom").read_text("utf-8")):
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.values())] = sample.value
    return found


def value(folder: Path, name: str, *labels: str) -> float:
    return samples(folder)[name][frozenset((folder.name, *labels))]


def test_prometheus_finds_the_last_numbers_in_a_file(tmp_path: Path) -> None:
    """A gauge keeps its last value; failures add up; the state is one of four."""
    tracker = TRACKERS.load("prometheus")(tmp_path, CONFIG, ())
    tracker.round(EVALUATED)
    tracker.round(SILENT)
    assert value(tmp_path, "regionfed_round") == 2.0
    assert value(tmp_path, "regionfed_rounds") == 4.0
    assert value(tmp_path, "regionfed_loss") == 2.5
    assert value(tmp_path, "regionfed_epsilon") == 1.75
    assert value(tmp_path, "regionfed_answered") == 0.0
    assert value(tmp_path, "regionfed_region_alpha", "UK") == 0.75
    assert value(tmp_path, "regionfed_region_personalised", "UK") == 0.75
    assert value(tmp_path, "regionfed_region_all_failures_total", "São Paulo (2)") == 2.0
    assert value(tmp_path, "regionfed_last_round_timestamp_seconds") > 1e9
    assert value(tmp_path, "regionfed_state", "running") == 1.0
    assert str(facts_of(CONFIG)[EPSILON]) in (tmp_path / "metrics.prom").read_text()
    tracker.close(summary_of("stopped"))
    assert value(tmp_path, "regionfed_state", "running") == 0.0
    assert value(tmp_path, "regionfed_state", "stopped") == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.prom"]


def test_prometheus_goes_on_with_a_resumed_run(tmp_path: Path) -> None:
    tracker = TRACKERS.load("prometheus")(tmp_path, CONFIG, (EVALUATED, SILENT))
    tracker.round(THIRD)
    assert value(tmp_path, "regionfed_region_all_failures_total", "São Paulo (2)") == 2.0
    assert value(tmp_path, "regionfed_loss") == 2.5  # the last that was known
    assert value(tmp_path, "regionfed_round") == 3.0


# --------------------------------------------------------------------------------- TensorBoard
def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_has_a_step_per_round(tmp_path: Path) -> None:
    """There to read after each round, before it is closed."""
    tracker = TRACKERS.load("tensorboard")(tmp_path, CONFIG, ())
    tracker.round(EVALUATED)
    tracker.round(SILENT)
    assert scalars(tmp_path, "run/epsilon") == [(1, 1.5), (2, 1.75)]
    assert scalars(tmp_path, "alpha/UK") == [(1, 0.75)]
    tracker.close(summary_of())
    told = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (text,) = told.Tensors(f"{EPSILON}/text_summary")
    assert text.tensor_proto.string_val[0].decode() == facts_of(CONFIG)[EPSILON]


def test_tensorboard_goes_on_with_a_resumed_run(tmp_path: Path) -> None:
    """A round that is done again counts once, as it was the last time."""
    factory = TRACKERS.load("tensorboard")
    first = factory(tmp_path, CONFIG, ())
    for record in (EVALUATED, SILENT, replace(THIRD, epsilon=9.0)):
        first.round(record)
    first.close(summary_of("stopped"))
    second = factory(tmp_path, CONFIG, (EVALUATED, SILENT))
    second.round(THIRD)
    second.close(summary_of())
    assert scalars(tmp_path, "run/epsilon") == [(1, 1.5), (2, 1.75), (3, 2.0)]


# -------------------------------------------------------------------------------------- MLflow
def test_mlflow_keeps_one_run_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever server the environment names; resumed it is the same run."""
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    factory = TRACKERS.load("mlflow")
    first = factory(tmp_path, CONFIG, ())
    first.round(EVALUATED)
    first.close(summary_of("failed"))
    second = factory(tmp_path, CONFIG, (EVALUATED,))
    second.round(SILENT)
    second.close(summary_of())
    client = MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("regionfed")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "run/epsilon")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.5), (2, 1.75)]
    assert run.data.metrics["failures/São Paulo _2_"] == 1.0
    assert run.data.params["server-lr"] == "1.0" and run.info.run_name == tmp_path.name
    assert run.info.status == "FINISHED"


# ------------------------------------------------------------------------------------- W and B
def test_wandb_stays_offline_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes below the run's folder; resumed it has the same id."""
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    factory = TRACKERS.load("wandb")
    for earlier, record in (((), EVALUATED), ((EVALUATED,), SILENT)):
        tracker = factory(tmp_path, CONFIG, earlier)
        tracker.round(record)
        tracker.close(summary_of())
    kept = {path.name for path in tmp_path.glob("wandb/offline-run-*/*.wandb")}
    assert kept == {f"run-{tmp_path.name}.wandb"}
    monkeypatch.setenv("WANDB_MODE", "disabled")
    before = sorted(tmp_path.glob("wandb/*"))
    factory(tmp_path, CONFIG, ()).close(summary_of())
    assert sorted(tmp_path.glob("wandb/*")) == before


# ------------------------------------------------------------------------------------ real runs
Make = Callable[..., Config]


@pytest.fixture
def small(t5_folder: Path, tmp_path: Path) -> Make:
    def make(**settings: Any) -> Config:
        base: dict[str, Any] = {
            "model": str(t5_folder),
            "examples_per_client": 24,
            "size_noise_multiplier": 5.0,
            "rounds": 3,
            "evaluate_every": 2,
            "rho_every": 0,
            "join_timeout": 120.0,
            "run_dir": str(tmp_path / "runs"),
        }
        return tiny_config(**{**base, **settings})

    return make


def test_a_run_is_tracked_and_the_same_with_trackers_as_without(
    small: Make, tmp_path: Path
) -> None:
    """Stopped after its first round and resumed, the track goes on; a broken tracker costs none."""
    plainly = execute(small(), say=lambda _: None, report=False)
    tracking = "prometheus,tensorboard,tests.unit.server_app.test_tracking:Odd"
    given = small(tracking=tracking)
    stopped = execute(given, say=lambda _: None, report=False, stopping=lambda: "asked to stop")
    folder = Path(stopped.paths["folder"])
    assert value(folder, "regionfed_state", "stopped") == 1.0
    tracked = execute(
        small(resume=str(folder)),
        say=lambda _: None,
        report=False,
    )
    assert tracked.status == "finished"
    assert plain(tracked.regions) == plain(plainly.regions)
    rows = read_rounds(folder / "metrics.jsonl")
    losses = [(row["round"], pytest.approx(row["loss"])) for row in rows]
    assert len(losses) == 3 and scalars(folder, "run/loss") == losses
    assert [step for step, _ in scalars(folder, "run/personalised_mean")] == [2, 3]
    assert value(folder, "regionfed_round") == 3.0
    assert value(folder, "regionfed_state", "finished") == 1.0
    assert value(folder, "regionfed_epsilon") == tracked.privacy.epsilon
    for region, record in tracked.regions.items():
        assert value(folder, "regionfed_region_alpha", region) == record.alpha
