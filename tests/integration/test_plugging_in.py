"""docs/plugging_in.md as a reader uses it: its code is run, and `regionfed new` is used."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from client_app.conformance import CHECKS, Failed, findings
from client_app.datasets.load import dataset_of
from regionfed.config import Config
from regionfed.errors import ConfigurationError
from server_app.cli import new, template
from server_app.cli.check import candidate_of
from server_app.cli.main import main
from server_app.run import execute

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "plugging_in.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"<!-- block: (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new project, importable, with the page's ClientApp beside its own."""
    folder = tmp_path / "my_app"
    new.write_project("my_app", folder)
    (folder / "my_app" / "plain.py").write_text(BLOCKS["my_app/plain.py"], encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    dataset_of.cache_clear()
    for name in [n for n in sys.modules if n.split(".")[0] == "my_app"]:
        del sys.modules[name]


def settings(project: Path, **changed: object) -> Config:
    return Config.from_run_config(
        {
            **new.settings_of("my_app", project),
            "rounds": 3,
            "workers": 1,
            "noise-seed": 0,
            "rho-every": 2,
            **{key.replace("_", "-"): value for key, value in changed.items()},
        }
    )


def test_the_page_s_task_and_client_are_those_of_a_new_project() -> None:
    """One text, in both places; and every check is listed."""
    assert BLOCKS["my_app/task.py"] == template.TASK
    assert BLOCKS["my_app/client.py"] == template.CLIENT
    assert all(check.name in PAGE for check in CHECKS)
    code = [line for line in template.TASK.splitlines() if line.strip()]
    assert len(code) < 50  # "about forty lines"


@pytest.mark.parametrize("app", ["client", "plain"])
def test_both_client_apps_keep_the_contract(project: Path, tmp_path: Path, app: str) -> None:
    """(a) with (c), and (b): the conformance kit finds nothing."""
    made = candidate_of(f"my_app.{app}:app", settings(project), None, 0, tmp_path)
    assert [(f.name, f.problem) for f in findings(made) if f.problem] == []


def test_the_plain_client_app_refuses_what_it_has_no_bound_for(
    project: Path, tmp_path: Path
) -> None:
    """(b) answers for examples: as one device, or within `most`, it says that it does not."""
    config = settings(project, unit="client", user_steps=0)
    made = candidate_of("my_app.plain:app", config, None, 0, tmp_path)
    asked: list[Callable[[], object]] = [
        made.update,
        made.scores,
        lambda: made.losses(made.point, [0.1]),
        lambda: made.profile(most=1),
    ]
    for ask in asked:
        with pytest.raises(Failed, match="this app answers for unit='example'"):
            ask()
    made = candidate_of("my_app.plain:app", settings(project), None, 0, tmp_path)
    with pytest.raises(Failed, match="meta-order=1"):
        made.update(inner_step=0.1)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (BLOCKS["my_app/plain.py"], "this app answers for unit='example'"),
        ("from flwr.clientapp import ClientApp\n\napp = ClientApp()\n", "delta"),
    ],
    ids=["it refuses", "it has no such answer"],
)
def test_an_app_that_cannot_answer_as_one_is_refused_before_the_first_round(
    project: Path, code: str, said: str
) -> None:
    """Its region may not tell that all devices failed, and would release noise alone (D5)."""
    (project / "my_app" / "wrong.py").write_text(code, encoding="utf-8")
    config = settings(project, unit="client", user_steps=0, client_app="my_app.wrong:app")
    with pytest.raises(ConfigurationError, match=rf"my_app.wrong:app.*train\.delta.*{said}"):
        execute(config, report=False)
    summary = json.loads((Path(config.run_dir) / "latest" / "summary.json").read_text("utf-8"))
    assert summary["status"] == "failed" and said in summary["reason"]
    assert not list(Path(config.run_dir).glob("*/regions/*/ledger.jsonl"))


def test_an_app_that_answers_as_one_runs(project: Path) -> None:
    """(c): ours behind a mod is asked beforehand, and goes on."""
    config = settings(project, unit="client", user_steps=0, rounds=1, rho_every=0)
    summary = execute(config, report=False)
    assert config.client_app == "my_app.client:app"
    assert summary.status == "finished" and not summary.failures


def test_both_client_apps_train_to_the_same_model(project: Path) -> None:
    """(b) does by hand what (a) leaves to us: with the same noise the scores are the same."""
    summaries = [
        execute(settings(project, client_app=f"my_app.{app}:app", user_steps=0), report=False)
        for app in ("client", "plain")
    ]
    assert [s.status for s in summaries] == ["finished", "finished"]
    assert not any(s.failures for s in summaries)
    assert summaries[0].personalised == summaries[1].personalised
    assert summaries[0].personalised.mean is not None


def test_a_new_project_learns_what_its_regions_disagree_about(project: Path) -> None:
    """Without noise its own models are better than the global one: the example is of use."""
    summary = execute(settings(project, rounds=25, privacy_mode="none", user_steps=0), report=False)
    assert summary.personalised.mean is not None and summary.global_.mean is not None
    assert summary.personalised.mean >= summary.global_.mean > 0.5


def test_the_commands_are_those_that_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`regionfed new` says what to type; a name that is none is refused."""
    assert main(["new", "shop", "--out", str(tmp_path / "shop")]) == 0
    said = capsys.readouterr().out
    assert "regionfed check shop.client:app --run-config settings.toml" in said
    assert (tmp_path / "shop" / "shop" / "task.py").read_text() == template.TASK
    assert 'clientapp = "shop.client:app"' in (tmp_path / "shop" / "pyproject.toml").read_text()
    assert main(["new", "shop", "--out", str(tmp_path / "shop")]) == 1
    assert main(["new", "my-shop", "--out", str(tmp_path / "other")]) == 1
    assert "package's name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("größe", "package's name"),
        ("class", "package's name"),
        ("__main__", "package's name"),
        ("2nd", "package's name"),
        ("json", "there already"),
        ("sys", "there already"),
        ("torch", "there already"),
        ("regionfed", "there already"),
    ],
)
def test_a_name_that_another_package_has_is_refused(tmp_path: Path, name: str, said: str) -> None:
    """`import` would find one of the two; and names are ASCII."""
    with pytest.raises(ConfigurationError, match=said):
        new.write_project(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_project_can_be_written_again_where_it_is_imported_from(project: Path) -> None:
    """Its own name is taken by itself."""
    new.write_project("my_app", project, force=True)


@pytest.mark.slow
def test_a_new_project_s_own_tests_and_check_pass_in_processes_of_their_own(tmp_path: Path) -> None:
    """As a reader types them, outside of this process."""
    folder = tmp_path / "my_app"
    new.write_project("my_app", folder)
    for command in (
        ["-m", "pytest", "-q", "-p", "no:cacheprovider"],
        [
            "-m",
            "server_app.cli.main",
            "check",
            "my_app.client:app",
            "--run-config",
            "settings.toml",
        ],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_client_app_of_one_s_own_trains_in_worker_processes(project: Path) -> None:
    """Spawned processes import it by its name."""
    summary = execute(
        settings(project, client_app="my_app.plain:app", workers=2, user_steps=0), report=False
    )
    assert summary.status == "finished" and not summary.failures
