"""A run's result, used as a person would: export, predict and adapt, through the command's door."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from client_app.datasets.dataset import Example
from client_app.datasets.load import dataset_of
from client_app.tasks.text_to_text import TextToText
from client_app.user import load_user
from region_app.state import StateFolder
from regionfed.config import Config
from regionfed.vector import Layout
from server_app.checkpoint import load_checkpoint
from server_app.cli.main import main
from server_app.run import execute
from tests.conftest import tiny_config

QUERIES = ["red trainrs size 9", "linen beige pram"]
HIDE = """\
import sys
for name in ("regionfed", "client_app", "region_app", "server_app", "strategies"):
    sys.modules[name] = None  # importing it fails
"""


def settings_of(t5_folder: Path, runs: Path) -> Config:
    return tiny_config(
        model=str(t5_folder),
        run_dir=str(runs),
        rounds=2,
        examples_per_client=24,
        size_noise_multiplier=5.0,
        rho_every=0,
        user_steps=2,
        user_scores="panel",
    )


@pytest.fixture(scope="module")
def run(t5_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two regions, as `runs/latest`."""
    runs = tmp_path_factory.mktemp("runs")
    execute(settings_of(t5_folder, runs), say=lambda _: None, report=False)
    return runs / "latest"


@pytest.fixture
def task(t5: TextToText) -> TextToText:
    """The model that the run began with; its weights are given."""
    return t5


def point_of(run: Path, region: str | None) -> torch.Tensor:
    """Return theta + alpha_r theta_r from the files of server and region, by hand."""
    _, state = load_checkpoint(run)
    if region is None:
        return state.average
    kept = StateFolder(run / "regions" / region).load(state.round)
    assert kept is not None and bool(kept.direction.any())
    return state.average + kept.alpha * kept.rho * kept.direction


def elsewhere(code: str, folder: Path, *arguments: str) -> str:
    """Run code in a process that cannot import this repository, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", HIDE + code, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PATH": "", "HF_HUB_OFFLINE": "1", "HOME": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ------------------------------------------------------------------------------------- export
@pytest.mark.parametrize("region", ["UK", None])
def test_an_exported_model_gives_the_same_logits_without_this_package(
    run: Path, task: TextToText, tmp_path: Path, region: str | None
) -> None:
    """M3: AutoModelForSeq2SeqLM in another process, against the weights that are federated."""
    out = tmp_path / "out"
    chosen = ["--region", region] if region else []
    assert main(["export", "--run", str(run), *chosen, "--out", str(out)]) == 0
    examples = [Example("spelling", query, "red trainers", "") for query in QUERIES]
    batch = task.encode(examples)
    layout = Layout.of(task.module)
    with torch.no_grad():
        expected = task._logits(layout.tensors(point_of(run, region)), batch)
    torch.save({"source": batch["source"], "inputs": batch["inputs"]}, tmp_path / "asked.pt")
    code = (
        "import torch\n"
        "from transformers import AutoModelForSeq2SeqLM\n"
        "asked = torch.load('asked.pt')\n"
        "model = AutoModelForSeq2SeqLM.from_pretrained('out').eval()\n"
        "with torch.no_grad():\n"
        "    logits = model(input_ids=asked['source'], attention_mask=asked['source'] != 0,\n"
        "                   decoder_input_ids=asked['inputs']).logits\n"
        "torch.save(logits, 'logits.pt')\n"
    )
    elsewhere(code, tmp_path)
    found = torch.load(tmp_path / "logits.pt")
    assert torch.allclose(found, expected, atol=1e-4)
    with torch.no_grad():
        start = task._logits(layout.tensors(layout.read(task.module)), batch)
    assert not torch.allclose(start, expected, atol=1e-3)


def test_the_page_s_own_code_answers(run: Path, task: TextToText, tmp_path: Path) -> None:
    """Copied from README.md into another process, it prints what the task would answer."""
    out = tmp_path / "out"
    assert main(["export", "--run", str(run), "--region", "UK", "--out", str(out)]) == 0
    page = (out / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    printed = elsewhere(f"folder = {str(out)!r}\n{code}", tmp_path)
    weights = Layout.of(task.module).tensors(point_of(run, "UK"))
    (name,) = re.findall(r'"(\w+): red trainrs size 9"', code)
    (answer,) = task.answers(weights, [Example(name, "red trainrs size 9", "", "")])
    assert printed.strip() == answer


def test_the_page_says_what_the_summary_says(run: Path, tmp_path: Path) -> None:
    """Privacy word by word, that the noise was seeded here, and this region's scores."""
    out = tmp_path / "out"
    assert main(["export", "--run", str(run), "--region", "UK", "--out", str(out)]) == 0
    page = (out / "README.md").read_text(encoding="utf-8")
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["privacy"]["statement"] in page
    assert "does not hold" in page  # tests seed the noise
    assert summary["evaluation"]["statement"] in page
    record = summary["regions"]["UK"]
    for task_name in (*dataset_of(Config()).tasks, "mean"):
        before, after = (100 * record[m][task_name] for m in ("global", "personalised"))
        assert f"| {task_name} | {before:.1f} | {after:.1f} |" in page
    facts = json.loads((out / "regionfed.json").read_text(encoding="utf-8"))
    assert facts["privacy"] == summary["privacy"] and facts["region"] == "UK"


def test_the_summary_tells_of_users_and_what_does_not_cover_them(run: Path) -> None:
    """Mean and worst region of the panel's own models; epsilon does not hold for those scores."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    means = {name: record["user"]["mean"] for name, record in summary["regions"].items()}
    assert summary["user"]["mean"] == pytest.approx(sum(means.values()) / len(means))
    assert summary["user"]["rrs"] == min(means.values())
    assert "Not covered: the scores of the panel's own models" in summary["privacy"]["statement"]
    assert "own models too" in summary["evaluation"]["statement"]


def test_a_folder_with_files_is_not_written_into_unless_forced(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And forced, what else is in it stays."""
    (tmp_path / "mine.txt").write_text("precious", encoding="utf-8")
    arguments = ["export", "--run", str(run), "--out", str(tmp_path)]
    assert main(arguments) == 1
    assert "--force" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    assert main([*arguments, "--force"]) == 0
    assert (tmp_path / "mine.txt").read_text(encoding="utf-8") == "precious"
    assert (tmp_path / "model.safetensors").is_file()


def test_a_region_exports_from_its_own_folder(run: Path, tmp_path: Path) -> None:
    """As in a deployment: the server's folder has no region's part, the region's has."""
    server, region = tmp_path / "server", tmp_path / "region"
    server.mkdir()
    for name in ("checkpoint.safetensors", "summary.json"):
        (server / name).write_bytes((run / name).read_bytes())
    region.mkdir()
    for file in (run / "regions" / "UK").iterdir():
        (region / file.name).write_bytes(file.read_bytes())
    apart = ["--run", str(server), "--region-state", str(region)]
    for name, where in (("together", ["--run", str(run)]), ("apart", apart)):
        out = str(tmp_path / name)
        assert main(["export", *where, "--region", "UK", "--out", out]) == 0
    one, other = (tmp_path / name / "model.safetensors" for name in ("together", "apart"))
    assert one.read_bytes() == other.read_bytes()


# ------------------------------------------------------------------------------------ predict
def answers_by_hand(task: TextToText, point: torch.Tensor) -> list[dict[str, str]]:
    weights = Layout.of(task.module).tensors(point)
    names = dataset_of(Config()).tasks
    rows = []
    for query in QUERIES:
        answers = [task.answers(weights, [Example(n, query, "", "")])[0] for n in names]
        rows.append({"query": query, **dict(zip(names, answers, strict=True))})
    return rows


def printed_rows(capsys: pytest.CaptureFixture[str]) -> list[Any]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_queries_are_answered_however_they_come(
    run: Path,
    task: TextToText,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Typed, from a file, by a pipe: all tasks, with the region's model."""
    expected = answers_by_hand(task, point_of(run, "UK"))
    base = ["predict", "--run", str(run), "--region", "uk", "--json"]
    assert main([*base, *QUERIES]) == 0
    assert printed_rows(capsys) == expected
    file = tmp_path / "queries.txt"
    file.write_text("\n".join([*QUERIES, ""]), encoding="utf-8")
    assert main([*base, "--file", str(file)]) == 0
    assert printed_rows(capsys) == expected
    with file.open(encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert main(base) == 0
    assert printed_rows(capsys) == expected
    assert main([*base, "--task", "intent", *QUERIES]) == 0
    assert printed_rows(capsys) == [{k: r[k] for k in ("query", "intent")} for r in expected]


def test_a_table_has_a_line_per_query(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under a header; the model of all without a region."""
    assert main(["predict", "--run", str(run), *QUERIES]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["query", *dataset_of(Config()).tasks]
    assert [line.startswith(q) for line, q in zip(lines, QUERIES, strict=True)] == [True, True]


# -------------------------------------------------------------------------------------- adapt
def own_file(folder: Path) -> Path:
    """Write a user's examples: those of a device that took no part."""
    data = dataset_of(Config()).client("UK", 7)
    path = folder / "my.jsonl"
    rows = [{"task": e.task, "source": e.source, "target": e.target} for e in data.train[:60]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_user_s_model_is_made_judged_and_used(
    run: Path, task: TextToText, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """theta + alpha_r theta_r + alpha_u theta_u_local answers; facts and screen agree."""
    me = tmp_path / "me"
    data = own_file(tmp_path)
    base = ["--run", str(run), "--region", "UK"]
    # The tiny model has learned nothing: large steps, so that answers change.
    more = ["--data", str(data), "--out", str(me), "--steps", "8", "--lr", "0.1"]
    assert main(["adapt", *base, *more]) == 0
    said = capsys.readouterr().out
    facts = json.loads((me / "user.json").read_text(encoding="utf-8"))
    assert facts["learned_from"] + facts["judged_by"] == 60 and facts["judged_by"] > 0
    assert facts["verdict"] in said and str(me) in said
    assert 0.5 <= facts["alpha"] <= 1.0
    point = point_of(run, "UK")
    user = load_user(me)
    theta_u = point + facts["alpha"] * user.own.part
    assert main(["predict", *base, "--user", str(me), "--json", *QUERIES]) == 0
    found = printed_rows(capsys)
    assert found == answers_by_hand(task, theta_u) != answers_by_hand(task, point)
    assert set(facts["scores"]) == {"global", "personalised", "user"}


def test_a_device_s_own_model_can_be_used(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one that the federation made on it."""
    folder = run / "devices" / "UK" / "1"
    facts = json.loads((folder / "user.json").read_text(encoding="utf-8"))
    assert set(facts["scores"]) == {"global", "personalised", "user"}
    arguments = ["predict", "--run", str(run), "--user", str(folder), "--json", *QUERIES]
    assert main([*arguments, "--region", "UK"]) == 0
    assert len(printed_rows(capsys)) == 2
    assert main([*arguments, "--region", "US"]) == 1
    assert "Say --region UK" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--run", "nowhere"], "no run 'nowhere'"),
        (["--region", "ukk"], "did you mean 'UK'"),
        (["--region", "Atlantis"], "This run has US, UK"),
        (["--task", "intnt"], "did you mean 'intent'"),
        (["--file", "no.txt"], "cannot read no.txt"),
        (["--user", "nobody"], "regionfed adapt"),
    ],
)
def test_errors_name_the_remedy(
    run: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit status 1, no traceback."""
    chosen = [] if "--run" in arguments else ["--run", str(run)]
    assert main(["predict", *chosen, *arguments, "query"]) == 1
    err = capsys.readouterr().err
    assert said in err and err.startswith("regionfed: ") and "Traceback" not in err


def test_a_run_that_has_not_finished_is_used_on_request_only(
    t5_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says how far it came, how to go on, and how to use it all the same."""
    config = settings_of(t5_folder, tmp_path)
    execute(config, say=lambda _: None, report=False, stopping=lambda: "asked to")
    arguments = ["predict", "--run", str(tmp_path / "latest"), "--json", "query"]
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert "1 of 2 rounds (stopped)" in err and "resume=" in err and "--unfinished" in err
    assert main([*arguments, "--unfinished"]) == 0
