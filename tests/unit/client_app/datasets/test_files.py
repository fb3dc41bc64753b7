"""The user's own files: columns, regions, clients, and errors that name the line."""

import gzip
import json
from pathlib import Path

import pytest

from client_app.datasets.dataset import DataConfig, FederatedDataset
from client_app.datasets.files import column_map, load
from client_app.datasets.spaces import Space, spaces_of
from regionfed.errors import DataError

COLUMNS = "source=query target=label region=country client=user task=kind"


def everything(data: FederatedDataset) -> list[tuple[str, int, str, str, str]]:
    return [
        (region, index, e.task, e.source, e.target)
        for region in data.regions
        for index in range(data.clients(region))
        for e in (*data.client(region, index).train, *data.client(region, index).test)
    ]


def rows(n: int = 24) -> list[dict[str, object]]:
    return [
        {
            "query": f"item {i}",
            "label": ("tea", "shoes", "car")[i % 3],
            "country": ("UK", "DE")[i % 2],
            "user": i % 4,
            "kind": "intent",
        }
        for i in range(n)
    ]


def write_csv(path: Path, table: list[dict[str, object]]) -> None:
    lines = [",".join(table[0]), *(",".join(map(str, row.values())) for row in table)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8-sig")  # as a spreadsheet does


def write_jsonl(path: Path, table: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")


def test_columns_say_region_client_and_task_whatever_the_kind_of_file(tmp_path: Path) -> None:
    """One file with columns: csv with a byte order mark, jsonl, and packed jsonl hold the same."""
    write_csv(tmp_path / "a.csv", rows())
    write_jsonl(tmp_path / "b.jsonl", rows())
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "b.jsonl").read_bytes()))
    found = [
        load(DataConfig(tmp_path / name, columns=COLUMNS))
        for name in ("a.csv", "b.jsonl", "c.jsonl.gz")
    ]
    assert everything(found[0]) == everything(found[1]) == everything(found[2])
    data = found[0]
    assert data.regions == ("DE", "UK") and data.tasks == ("intent",)
    assert [data.clients(r) for r in data.regions] == [2, 2]
    assert sorted(e[3:] for e in everything(data)) == sorted(
        (str(row["query"]), str(row["label"])) for row in rows()
    )
    assert {e[3] for e in everything(data) if e[0] == "UK"} == {
        f"item {i}" for i in range(0, 24, 2)
    }


def test_parquet_holds_the_same(tmp_path: Path) -> None:
    """With its own types: numbers as users."""
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")
    from pyarrow import parquet

    write_jsonl(tmp_path / "b.jsonl", rows())
    parquet.write_table(pyarrow.Table.from_pylist(rows()), tmp_path / "a.parquet")
    a, b = (load(DataConfig(tmp_path / n, columns=COLUMNS)) for n in ("a.parquet", "b.jsonl"))
    assert everything(a) == everything(b)


def test_a_file_for_each_client_and_a_folder_for_each_region(tmp_path: Path) -> None:
    """No column needed: names say it."""
    for region in ("UK", "IN"):
        for client in ("ann", "bob", "cid"):
            (tmp_path / region).mkdir(exist_ok=True)
            table = [{"source": f"{client} {i}", "target": "t"} for i in range(5)]
            write_jsonl(tmp_path / region / f"{client}.jsonl", table)
    data = load(DataConfig(tmp_path))
    assert data.regions == ("IN", "UK")
    assert data.clients("UK") == 3
    for index, client in enumerate(("ann", "bob", "cid")):
        mine = data.client("UK", index)
        assert {e.source.split()[0] for e in (*mine.train, *mine.test)} == {client}


@pytest.mark.parametrize("alpha", [1e-3, 0.3, 100.0])
def test_what_nothing_says_is_drawn_and_nobody_is_left_without(
    tmp_path: Path, alpha: float
) -> None:
    """E5: regions and clients by Dirichlet over labels; deterministic, never empty."""
    table = [{"source": f"q{i}", "target": str(i % 3)} for i in range(90)]
    write_jsonl(tmp_path / "all.jsonl", table)
    config = DataConfig(
        tmp_path / "all.jsonl", regions=3, clients_per_region=5, dirichlet=alpha, seed=1
    )
    data = load(config)
    assert data.regions == ("R1", "R2", "R3")
    counts = [
        len(d.train) + len(d.test)
        for r in data.regions
        for d in (data.client(r, i) for i in range(5))
    ]
    assert sum(counts) == 90 and min(counts) >= 1
    assert everything(data) == everything(load(config))


def test_clients_without_a_region_are_dealt_out_whole(tmp_path: Path) -> None:
    """A person is in one region."""
    table = [{"source": f"q{i}", "target": "t", "client": f"u{i % 7}"} for i in range(70)]
    write_jsonl(tmp_path / "all.jsonl", table)
    data = load(DataConfig(tmp_path / "all.jsonl", regions=3))
    owners = {
        region: {int(e[3][1:]) % 7 for e in everything(data) if e[0] == region}
        for region in data.regions
    }
    assert sum(map(len, owners.values())) == 7


def test_a_group_is_on_one_side_for_all_devices(tmp_path: Path) -> None:
    """E7: by the group column: here products."""
    table = [
        {"source": f"review {i}", "target": str(i % 2), "product": f"p{i % 10}"} for i in range(200)
    ]
    write_jsonl(tmp_path / "all.jsonl", table)
    data = load(DataConfig(tmp_path / "all.jsonl", regions=2, columns="group=product"))
    sides: tuple[set[str], set[str]] = (set(), set())
    for region in data.regions:
        for index in range(data.clients(region)):
            client = data.client(region, index)
            sides[0].update(e.group for e in client.train)
            sides[1].update(e.group for e in client.test)
    assert sides[0] and sides[1] and not sides[0] & sides[1]


def test_labels_are_stated_beside_the_files(tmp_path: Path) -> None:
    """M11: the label space is global, and in a file, not read from examples."""
    write_jsonl(tmp_path / "a.jsonl", [{"source": "x y", "target": "tea", "task": "intent"}] * 3)
    stated = {
        "intent": ["tea", "shoes"],
        "spelling": {"kind": "text"},
        "entities": {"kind": "tags", "labels": ["other", "brand"]},
    }
    (tmp_path / "labels.json").write_text(json.dumps(stated))
    data = load(DataConfig(tmp_path))
    assert data.tasks == ("intent", "spelling", "entities")
    assert spaces_of(data) == {
        "intent": Space("class", ("tea", "shoes")),
        "spelling": Space("text"),
        "entities": Space("tags", ("other", "brand")),
    }
    (tmp_path / "labels.json").unlink()
    with pytest.raises(DataError, match=r"labels\.json beside them"):
        spaces_of(load(DataConfig(tmp_path)))


GOOD = '{"source": "a", "target": "tea"}\n'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", GOOD + '{"source": " ", "target": "tea"}\n', "line 2: 'source' must be a text"),
        ("a.jsonl", GOOD + '{"source": "a", "target": null}\n', "line 2: 'target' must be a text"),
        (
            "a.jsonl",
            GOOD + '{"source": "a", "taret": "tea"}\n',
            "line 2: no column 'target'.*'taret'",
        ),
        ("a.jsonl", GOOD + "{nonsense\n", "line 2: not JSON"),
        ("a.jsonl", GOOD + "[1]\n", "line 2: expected an object"),
        ("a.jsonl", GOOD + '{"source": "a", "target": "tee"}\n', "line 2.*label 'tee'.*'tea'"),
        ("a.jsonl", GOOD.encode() + b'{"source": "\xff"}\n', "line 2: not UTF-8"),
        ("a.csv", "source,target\na,tea\nb\n", "line 3: expected 2 fields"),
        ("a.csv", "query,target\na,tea\n", "line 2: no column 'source'.*columns="),
        ("a.csv", 'source,target\n"a,tea\n', "not CSV"),
        ("a.jsonl", "", "holds no example"),
        ("a.xlsx", "", "no file of the kinds"),
        ("a.jsonl.gz", "not packed", "cannot read"),
    ],
)
def test_errors_name_the_line_and_the_remedy(
    tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    """Encoding, empty text, missing columns, unknown labels, broken lines."""
    data = content.encode() if isinstance(content, str) else content
    (tmp_path / name).write_bytes(data)
    (tmp_path / "labels.json").write_text('{"answer": ["tea", "shoes"]}')
    with pytest.raises(DataError, match=said):
        load(DataConfig(tmp_path))


def test_a_column_map_is_read_or_refused() -> None:
    """Quotes around names with spaces; the nearest key is named."""
    assert column_map("source='search term' target=y")["source"] == "search term"
    assert column_map("")["source"] == "source"
    with pytest.raises(DataError, match="did you mean 'source'"):
        column_map("sorce=x")
    with pytest.raises(DataError, match="key=column"):
        column_map("source")
