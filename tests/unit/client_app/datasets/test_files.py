"""The user's own files: columns, regions, clients, and errors that name the line."""

import gzip
import json
from pathlib import Path

import pytest

from client_app.datasets.dataset import DataConfig, FederatedDataset
from client_app.datasets.files import column_map, load
from client_app.datasets.load import check_region, check_regions, dataset_of
from client_app.datasets.spaces import Space, spaces_of
from regionfed.errors import DataError
from tests.conftest import tiny_config

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


def test_names_of_folders_and_files_are_taken_whole(tmp_path: Path) -> None:
    """A folder within a folder is one name of a region; only the file's kind is cut off."""
    (tmp_path / "EU" / "north").mkdir(parents=True)
    for client in ("ann.smith", "ann.jones"):
        table = [{"source": f"{client} {i}", "target": "t"} for i in range(5)]
        write_jsonl(tmp_path / "EU" / "north" / f"{client}.jsonl", table)
    packed = gzip.compress((tmp_path / "EU" / "north" / "ann.smith.jsonl").read_bytes())
    (tmp_path / "EU" / "north" / "bob.j.jsonl.gz").write_bytes(packed)
    data = load(DataConfig(tmp_path))
    assert data.regions == ("EU-north",) and data.clients("EU-north") == 3


def test_two_folders_that_would_be_one_region_are_refused(tmp_path: Path) -> None:
    """By both names; a column that names the regions settles it."""
    for folder in ("a-b/c", "a/b-c"):
        land = folder.replace("/", "_")
        table = [{"source": f"{folder} {i}", "target": "t", "land": land} for i in range(5)]
        (tmp_path / folder).mkdir(parents=True)
        write_jsonl(tmp_path / folder / "x.jsonl", table)
    with pytest.raises(DataError, match=r"a/b-c and .*a-b/c would both be the region 'a-b-c'"):
        load(DataConfig(tmp_path))
    assert load(DataConfig(tmp_path, columns="region=land")).regions == ("a-b_c", "a_b-c")


@pytest.mark.parametrize("pair", [("UK", "uk"), ("Straße", "STRASSE"), ("é", "e\u0301")])
def test_two_regions_that_would_share_a_folder_are_refused(pair: tuple[str, str]) -> None:
    """Where a system folds case or writes accents apart, they would share one ledger."""
    with pytest.raises(DataError, match=r"the regions .* would share a folder"):
        check_regions(("US", *pair))
    check_regions(("US", "UK", "São Paulo", "Sao Paulo"))


def test_numbers_that_differ_are_different_clients(tmp_path: Path) -> None:
    """In full, whatever their length; a whole number is one with and without a point."""
    clients = [1234567, 1234568, 1234567.0, 1e300, 0.1234567, 0.12345678]
    table = [{"source": f"q{i}", "target": "t", "client": c} for i, c in enumerate(clients)]
    write_jsonl(tmp_path / "all.jsonl", [{**row, "region": "UK"} for row in table])
    assert load(DataConfig(tmp_path / "all.jsonl")).clients("UK") == 5


@pytest.mark.parametrize("what", ["region", "client"])
def test_some_rows_without_a_region_or_client_are_refused(tmp_path: Path, what: str) -> None:
    """A person's rows would be drawn to several devices; the first such line is named."""
    table = [{"source": f"q{i}", "target": "t", what: "a"} for i in range(3)]
    del table[1][what]
    write_jsonl(tmp_path / "all.jsonl", table)
    with pytest.raises(DataError, match=rf"line 2: no {what}.*1 of 3.*all of them one, or none"):
        load(DataConfig(tmp_path / "all.jsonl"))


@pytest.mark.parametrize(
    "name",
    ["..", ".", "", "a/b", "a\\b", "/etc", "C:", "a\0b", "a\nb", "a\x1b[0m", "\ud800", "é" * 51],
)
def test_a_region_whose_name_is_no_folder_is_refused(name: str) -> None:
    """Whatever dataset it comes from; the error names it and says what to do."""
    with pytest.raises(DataError, match=r"the region '.*' cannot have a folder.*Rename it"):
        check_region(name)


@pytest.mark.parametrize("name", ["UK", "en-GB", "São Paulo", "North East", "a.b", "é" * 50])
def test_a_region_may_have_the_name_that_its_people_use(name: str) -> None:
    """Not ASCII alone."""
    check_region(name)


def test_a_region_from_a_file_is_refused_where_the_dataset_enters(tmp_path: Path) -> None:
    """Once, for the server and each device."""
    table = [{"source": "q", "target": "t", "region": "../../etc", "client": "a"}]
    write_jsonl(tmp_path / "all.jsonl", table)
    with pytest.raises(DataError, match=r"'\.\./\.\./etc' cannot have a folder"):
        dataset_of(tiny_config(dataset="files", data_path=str(tmp_path / "all.jsonl")))


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
        ("a.jsonl.gz", b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + b"\xff" * 20, "cannot read"),
        ("a.csv", "source,target\n\n\na,tea,more\n", "line 4: expected 2 fields"),
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


def test_a_kind_of_answers_that_there_is_not_is_refused(tmp_path: Path) -> None:
    """With the file, and the kind that was meant."""
    write_jsonl(tmp_path / "a.jsonl", [{"source": "x", "target": "tea"}])
    (tmp_path / "labels.json").write_text('{"answer": {"kind": "tag", "labels": ["tea"]}}')
    with pytest.raises(DataError, match=r"labels\.json: unknown kind.*'tag'; did you mean 'tags'"):
        load(DataConfig(tmp_path))


def test_a_column_map_is_read_or_refused() -> None:
    """Quotes around names with spaces; the nearest key is named."""
    assert column_map("source='search term' target=y")["source"] == "search term"
    assert column_map("")["source"] == "source"
    with pytest.raises(DataError, match="did you mean 'source'"):
        column_map("sorce=x")
    with pytest.raises(DataError, match="key=column"):
        column_map("source")
