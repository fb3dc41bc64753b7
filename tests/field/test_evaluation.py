"""Field cases E5 to E7: partitions without surprises, empty splits, splits that do not leak."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from client_app.datasets.dataset import ClientData, DataConfig, Example, FederatedDataset
from client_app.datasets.esci import SOURCES, load, query_key
from client_app.datasets.partition import dirichlet_partition
from regionfed.errors import DataError
from server_app.run import execute
from tests.conftest import tiny_config

SHARED = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
REAL = Path(os.environ.get("REGIONFED_DATA", SHARED))


@pytest.mark.parametrize("alpha", [1e-9, 1e-3, 0.3, 1e6])
@pytest.mark.parametrize(
    "labels",
    [
        np.zeros(100, dtype=int),
        np.arange(100),
        np.repeat([0, 1], [99, 1]),
        np.arange(100) % 7,
    ],
    ids=["one class", "as many classes as rows", "a class of one row", "seven classes"],
)
@pytest.mark.parametrize(("parts", "minimum"), [(10, 10), (10, 1), (100, 1), (1, 100), (3, 0)])
def test_e5_every_part_gets_its_minimum_without_retries(labels, alpha, parts, minimum):
    """E5.

    Dirichlet partitions with zero rows, NaN probabilities, or endless retries for a minimum
    size. -> a deterministic partitioner with a guaranteed minimum: alpha 1e-3, more classes
    than samples, one-class clients.
    """
    with np.errstate(all="raise", under="ignore"):
        shared = dirichlet_partition(labels, parts, alpha, minimum, np.random.default_rng(0))
    assert sorted(np.concatenate(shared)) == list(range(100))
    assert min(part.size for part in shared) >= minimum


def test_e5_a_minimum_that_cannot_be_met_is_refused():
    """E5: endless retries for a minimum size. -> refused at once, with the numbers."""
    with pytest.raises(DataError, match="takes 20"):
        dirichlet_partition(range(19), 10, 1e-3, 2, np.random.default_rng(0))


def test_e5_a_one_class_device_can_be_shared_out_again():
    """E5: one-class clients. -> the second level, within such a region, works as well."""
    labels = np.repeat(np.arange(8), 40)
    rng = np.random.default_rng(0)
    regions = dirichlet_partition(labels, 8, 1e-3, 20, rng)
    assert any(np.unique(labels[region]).size == 1 for region in regions)
    for region in regions:
        assert min(p.size for p in dirichlet_partition(labels[region], 10, 1e-3, 2, rng)) >= 2


def sides(data: FederatedDataset, kind: str) -> tuple[set[str], set[str]]:
    """Return all `kind` ("source", "group" ...) of the training and of the test examples."""
    clients = [data.client(r, n) for r in data.regions for n in range(data.clients(r))]
    train = {getattr(example, kind) for client in clients for example in client.train}
    test = {getattr(example, kind) for client in clients for example in client.test}
    return train, test


@pytest.mark.parametrize("seed", range(5))
def test_e7_a_query_is_on_one_side_in_every_task_and_spelling(tmp_path, seed):
    """E7.

    Several products of one query on both sides of the split inflate accuracy (0.747 -> 0.615
    once removed). -> split by query.
    """
    # Each query comes back with other capitals, another hyphenation, as a typing mistake, as
    # the correction of two mistakes, and in all three files.
    queries = [f"gas mower {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    content = {
        "intent": "query,category\n"
        + "".join(f"{q.upper()},Books\n{q.replace('gas', 'gsa')},Books\n" for q in queries),
        "spelling": "typed,corrected\n"
        + "".join(
            f"{q.replace('gas', 'gsa')},{q}\n{q.replace('mower', 'moer')},{q}\n" for q in queries
        ),
        "entities": "".join(
            json.dumps({"tokens": tokens, "labels": ["O"] * len(tokens)}) + "\n"
            for q in queries
            for tokens in (q.split(), q.replace(" ", " - ").split(), ["gas", "moer", q[-1]])
        ),
    }
    for task, (_, name, _) in SOURCES.items():
        (tmp_path / name).write_text(content[task], encoding="utf-8")

    data = load(DataConfig(tmp_path, regions=2, clients_per_region=2, seed=seed))

    train, test = sides(data, "source")
    last_letters = [{source[-1] for source in side} for side in (train, test)]
    assert not last_letters[0] & last_letters[1]
    assert len(last_letters[0] | last_letters[1]) == 26
    assert test


def test_e7_real_queries_are_on_one_side():
    """E7: the same, on real ESCI queries, their corrections included."""
    if not (REAL / "queryner_esci" / "queryner_esci.jsonl").is_file():
        pytest.skip(f"no ESCI files under {REAL}; set REGIONFED_DATA to the folder of them")
    data = load(DataConfig(REAL))
    for kind in ("group", "source"):
        train, test = sides(data, kind)
        assert train and test and not train & test
    keys = [{query_key(source) for source in side} for side in sides(data, "source")]
    assert not keys[0] & keys[1]
    spelling = [
        {query_key(e.target) for r in data.regions for n in range(10) for e in clients(r, n)}
        for clients in (
            lambda r, n: [e for e in data.client(r, n).train if e.task == "spelling"],
            lambda r, n: [e for e in data.client(r, n).test if e.task == "spelling"],
        )
    ]
    assert not spelling[0] & spelling[1]


class Sparse:
    """Two regions: one judges spelling alone, the other nothing; devices hold next to nothing."""

    regions = ("North", "South")
    tasks = ("intent", "spelling")

    def clients(self, region: str) -> int:
        return 3

    def client(self, region: str, index: int) -> ClientData:
        spelling = Example("spelling", "red shos", "red shoes", "shoes")
        intent = Example("intent", "red shoes", "red", "shoes")
        test = (spelling,) if region == "North" and index == 0 else ()
        # The second device has one example, the third has none at all.
        return ClientData(((intent, spelling), (intent,), ())[index], test)


def sparse(config: DataConfig) -> FederatedDataset:
    return Sparse()


def test_e6_a_score_that_nobody_can_give_is_null_with_a_reason(
    t5_folder: Path, tmp_path: Path
) -> None:
    """E6.

    A client with one example, an empty split, or no test split. -> metric null with the reason,
    never a division by zero.
    """
    config = tiny_config(
        model=str(t5_folder),
        dataset="tests.field.test_evaluation:sparse",
        clients_per_region=3,
        rounds=1,
        privacy_mode="none",
        run_dir=str(tmp_path),
        join_timeout=120.0,
    )
    summary = execute(config)
    assert summary.status == "finished"
    assert not summary.failures
    written = json.loads((tmp_path / "latest" / "summary.json").read_text())
    north, south = written["regions"]["North"], written["regions"]["South"]
    for model in ("global", "personalised"):
        assert north[model]["intent"] is None
        assert north[model]["mean"] == north[model]["spelling"] == 0.0
        assert set(south[model].values()) == {None}
        assert written[model] == {"mean": 0.0, "rrs": 0.0, "worst": "North"}
    assert north["reason"].endswith("no held-out examples of intent")
    assert south["reason"].endswith("no held-out examples of intent, spelling")
