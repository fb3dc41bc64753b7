"""Field case M10: with the network taken away, models, tokenizers and a whole run come from here.

The functions that the unit tests replace are those that we know of. Here it is a process that has
no network at all where the system can take it away, and in which every look-up and connection
fails by an audit hook anyway.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from client_app.models import byte_tokenizer
from client_app.tasks.labels import labels_of_all
from tests.conftest import SPACES, tiny_roberta

ROOT = Path(__file__).resolve().parents[2]
NO_NETWORK = ["unshare", "--map-root-user", "--net"]

PROGRAM = """
import json, sys

asked = []


def blocked(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        asked.append(event)
        raise OSError(f"the network was asked: {event} {arguments}")


sys.addaudithook(blocked)
from client_app.models import load
from client_app.task import task_of
from regionfed.errors import ConfigurationError
from server_app.run import execute
from tests.conftest import tiny_config

folder, runs = sys.argv[1:]
small = "num_layers=1,num_decoder_layers=1,d_model=16,d_kv=8,d_ff=16,num_heads=2"
for model in ("retail-t5", folder, f"t5:{small}", "example/tiny-t5", f"example/tiny-t5@{40 * '0'}"):
    task_of(tiny_config(model=model))
roberta = load(tiny_config(task="labels", model="example/tiny-roberta"), "roberta")
try:
    task_of(tiny_config(model="example/not-here"))
except ConfigurationError as error:
    refused = str(error)
summary = execute(
    tiny_config(
        model="example/tiny-t5", rounds=1, examples_per_client=24, run_dir=runs, rho_every=0,
        privacy_mode="none",
    ),
    say=lambda _: None,
    report=False,
)
print(json.dumps({
    "asked": asked, "refused": refused, "status": summary.status,
    "labels": roberta.module.config.num_labels,
}))
"""


def cached(home: Path, name: str, folder: Path) -> None:
    """Put a model's folder into a hub's cache, as a download leaves it there."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    commit = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())


@pytest.fixture(scope="module")
def home(t5_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub's cache that holds a T5 and a RoBERTa."""
    home, roberta = (tmp_path_factory.mktemp(name) for name in ("home", "roberta"))
    task = tiny_roberta()
    task.module.save_pretrained(roberta)
    byte_tokenizer().save_pretrained(roberta)
    cached(home, "example/tiny-t5", t5_folder)
    cached(home, "example/tiny-roberta", roberta)
    return home


def without_network(program: str, home: Path, *arguments: str) -> dict[str, Any]:
    """Run a program in a process that has no network; return the JSON that it printed last."""
    tried = subprocess.run([*NO_NETWORK, "true"], capture_output=True, check=False)
    prefix = NO_NETWORK if tried.returncode == 0 else []
    done = subprocess.run(
        [*prefix, sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_m10_told_to_be_offline_everything_comes_from_folders_and_the_cache(
    home: Path, t5_folder: Path, tmp_path: Path
) -> None:
    """M10.

    The tokenizer or model contacts a hub although offline. -> local files only when asked: what is
    shipped, a folder, random weights, and names that are in the cache load, and a whole run ends;
    a name that is not there is refused at once, with what to give instead.
    """
    found = without_network(PROGRAM, home, str(t5_folder), str(tmp_path / "runs"))
    assert found["asked"] == []
    assert found["status"] == "finished"
    assert found["labels"] == len(labels_of_all(SPACES))
    assert "no hub is asked (HF_HUB_OFFLINE=1)" in found["refused"]
    assert "Give a folder made by save_pretrained, a name that is in the cache" in found["refused"]
