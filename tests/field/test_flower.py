"""Field cases F2 and F7 to F10: one seed has one result, nothing is lost, settings exist."""

import difflib
import json
import tomllib
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import regionfed
from client_app.app import workbench
from regionfed.config import Config, key_of
from regionfed.errors import ConfigurationError
from regionfed.records import RoundRecord
from server_app.checkpoint import load_checkpoint
from server_app.federation import prepare
from server_app.progress import Progress
from server_app.run import execute, runs_root, simulate
from tests.conftest import Run, run_rounds, tiny_config

ROOT = Path(__file__).resolve().parents[2]


def config_of(t5_folder: Path, **settings: Any) -> Config:
    base: dict[str, Any] = {
        "model": str(t5_folder),
        "examples_per_client": 24,
        "size_noise_multiplier": 5.0,
        "rounds": 2,
        "rho_every": 1,
        "rho_evaluations": 2,
        "evaluate_every": 2,
        "evaluation_privacy": "noised",
        "join_timeout": 120.0,
    }
    return tiny_config(**{**base, **settings})


def run_of(config: Config, folder: Path, *, run_id: int = 1) -> Run:
    """Run a simulation, wired as `flwr run` wires it."""
    federation = prepare(config)
    with closing(simulate(config, federation, folder, run_id)) as grid:
        return run_rounds(
            grid,
            dict(federation.regions),
            config,
            federation.theta,
            tasks=federation.tasks,
            layout=federation.layout.fingerprint,
        )


def bytes_of(run: Run) -> list[bytes]:
    """Return theta after each round."""
    return [state.theta.numpy().tobytes() for state in run.states]


# ----------------------------------------------------------------------------------------- F2
def test_f2_a_run_says_which_version_was_imported(
    t5_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """F2.

    A run may `uv sync` the app's dependencies and shadow the installed package. -> the imported
    version is logged, first of all. (That it is switched off: tests/integration/test_compose.py.)
    """
    monkeypatch.setattr(regionfed, "__version__", "9.9.9")
    execute(config_of(t5_folder, rounds=1, run_dir=str(tmp_path)), report=False)
    assert capsys.readouterr().out.startswith("RegionFed 9.9.9: 2 regions")
    summary = json.loads((tmp_path / "latest" / "summary.json").read_text("utf-8"))
    assert summary["versions"]["regionfed"] == "9.9.9"


# ----------------------------------------------------------------------------------------- F7
@pytest.fixture(scope="module")
def reference(t5_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A first run, by one worker."""
    return run_of(config_of(t5_folder), tmp_path_factory.mktemp("first"))


def test_f7_the_same_seed_gives_the_same_bits(
    t5_folder: Path, tmp_path: Path, reference: Run
) -> None:
    """F7.

    Same seed, different result (global random state, arrival order). -> seeds derived from (run,
    round, region, client, purpose); sums in a fixed order; bitwise-equal reruns in simulation
    with noise seeded for tests only. Folder, run number and global state are not the run.
    """
    torch.manual_seed(12345)
    workbench.cache_clear()
    again = run_of(config_of(t5_folder), tmp_path / "another", run_id=99)
    assert len(reference.states) == 2 and not any(r.failures for r in reference.records)
    assert bytes_of(again) == bytes_of(reference)
    assert again.records[-1].personalised == reference.records[-1].personalised
    for one, other in zip(again.records, reference.records, strict=True):
        assert one.regions == other.regions and one.loss == other.loss


def test_f7_the_number_of_workers_does_not_matter(
    t5_folder: Path, tmp_path: Path, reference: Run
) -> None:
    """F7.

    -> bitwise equal whoever computes it, and in whatever order the regions answer: one process,
    or two workers of which each has a region.
    """
    assert bytes_of(run_of(config_of(t5_folder, workers=2), tmp_path)) == bytes_of(reference)


@pytest.mark.parametrize(
    ("settings", "same"),
    [({}, True), ({"seed": 1}, False), ({"noise_seed": 1}, False), ({"noise_seed": -1}, False)],
    ids=["same seeds", "another seed", "another noise seed", "secure noise"],
)
def test_f7_both_seeds_count_and_nothing_else(
    t5_folder: Path, tmp_path: Path, reference: Run, settings: dict[str, int], same: bool
) -> None:
    """F7.

    -> the seed of data and sampling counts, and that of the noise, which is seeded for tests only;
    whether anybody evaluates does not.
    """
    config = config_of(t5_folder, evaluation_privacy="off", **settings)
    for one, other in zip(bytes_of(run_of(config, tmp_path)), bytes_of(reference), strict=True):
        assert (one == other) is same


# ---------------------------------------------------------------------------------------- F10
@pytest.mark.parametrize("field", fields(Config), ids=key_of)
def test_f10_a_mistyped_key_names_its_nearest_match(field: Any) -> None:
    """F10.

    The run configuration is flat and only existing keys can be overridden. -> one schema with
    defaults and ranges; an unknown key names its nearest match.
    """
    key = key_of(field)
    wrong = key[:-1] + ("x" if key[-1] != "x" else "y")
    keys = [key_of(f) for f in fields(Config)]
    assert difflib.get_close_matches(wrong, keys, n=1) == [key]
    with pytest.raises(ConfigurationError, match=f"'{wrong}'; did you mean '{key}'"):
        Config.from_run_config({wrong: field.default})


def test_f10_nothing_like_it_is_still_an_error() -> None:
    """F10.

    -> no unknown key is ever ignored.
    """
    with pytest.raises(ConfigurationError, match="unknown setting 'qqqqqq'"):
        Config.from_run_config({"qqqqqq": 1})


def test_f10_every_setting_can_be_overridden_and_has_one_default() -> None:
    """F10.

    -> one schema: what `flwr run --run-config` may name is what the schema has, with its default.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["flwr"]["app"]["config"] == Config().to_run_config()


# ----------------------------------------------------------------------------------------- F8
def test_f8_metrics_and_a_checkpoint_are_there_after_every_round(
    t5_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F8.

    Metrics appear only at the end; Ctrl-C loses all. -> JSON lines per round, atomic checkpoints,
    SIGINT and SIGTERM save. (The signals: tests/integration/test_stopping.py.)
    """
    seen: list[tuple[int, int]] = []
    report = Progress.round

    def look(progress: Progress, record: RoundRecord) -> None:
        report(progress, record)
        run = next(path for path in tmp_path.iterdir() if not path.is_symlink())
        lines = (run / "metrics.jsonl").read_text().splitlines()
        _, state = load_checkpoint(run)
        seen.append((len(lines), state.round))

    monkeypatch.setattr(Progress, "round", look)
    execute(config_of(t5_folder, rounds=3, run_dir=str(tmp_path)))
    assert seen == [(1, 1), (2, 2), (3, 3)]


# ----------------------------------------------------------------------------------------- F9
def test_f9_paths_are_absolute_and_the_readme_tells_of_stream(
    t5_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """F9.

    `flwr run` prints nothing without --stream and runs in another directory. -> the README says
    so; absolute output paths are printed.
    """
    monkeypatch.chdir(tmp_path)
    assert runs_root(config_of(t5_folder, run_dir="here")) == ROOT / "here"
    summary = execute(config_of(t5_folder, rounds=1, run_dir=str(tmp_path)))
    printed = capsys.readouterr().out
    for name, path in summary.paths.items():
        assert Path(path).is_absolute(), name
        assert Path(path).exists(), name
        assert path in printed
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "Without `--stream` it prints nothing" in readme
    assert "runs an app in a folder of its own" in readme
