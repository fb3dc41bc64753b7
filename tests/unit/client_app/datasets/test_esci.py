"""The ESCI loader, on a tiny folder that is written here and on the real files if present."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from client_app.datasets.dataset import DATASETS, DataConfig, Example, FederatedDataset
from client_app.datasets.esci import (
    HELD_OUT,
    MAX_WORDS,
    SOURCES,
    TYPE_WORDS,
    load,
    normalise,
    query_key,
    shortened,
    slip,
)
from client_app.datasets.shared import SharedDataset
from regionfed.errors import DataError

SHARED = Path(__file__).resolve().parents[4] / ".." / "shared" / "data"
REAL = Path(os.environ.get("REGIONFED_DATA", SHARED))

needs_real_data = pytest.mark.skipif(
    not (REAL / "queryner_esci" / "queryner_esci.jsonl").is_file(),
    reason=f"no ESCI files under {REAL}; set REGIONFED_DATA to the folder that holds them",
)

INTENT, SPELLING, ENTITIES = (f"{folder}/{name}" for folder, name, _ in SOURCES.values())


def write(folder: Path, **changed: str | bytes) -> Path:
    """Write a small, valid folder; `changed` replaces a file's content by task name."""
    kinds = ["B-color", "B-UoM", "O"]
    content: dict[str, str | bytes] = {
        "intent": "query,category,votes\n"
        + "".join(f'lamp {n},"Clothing, Shoes & {n % 4}",3\n' for n in range(40)),
        "spelling": "typed,corrected\n"
        + "".join(f"gas mowe {n},gas mower {n}\n" for n in range(40)),
        "entities": "".join(
            json.dumps({"tokens": ["red", f"shoe{n}"], "labels": [kinds[n % 3], "O"]}) + "\n"
            for n in range(80)
        ),
        **changed,
    }
    for task, (subfolder, name, _) in SOURCES.items():
        path = folder / subfolder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content[task]
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def small(folder: Path, **changed: int | float) -> SharedDataset:
    return load(DataConfig(**{"path": folder, "regions": 2, "clients_per_region": 3, **changed}))


def examples(data: FederatedDataset, side: str, task: str | None = None) -> list[Example]:
    return [
        example
        for region in data.regions
        for index in range(data.clients(region))
        for example in getattr(data.client(region, index), side)
        if task in (None, example.task)
    ]


def everything(data: FederatedDataset, task: str | None = None) -> list[Example]:
    return examples(data, "train", task) + examples(data, "test", task)


def test_every_row_reaches_one_device(tmp_path):
    data = small(write(tmp_path))
    assert data.regions == ("R1", "R2")
    assert data.tasks == ("intent", "spelling", "entities")
    assert [data.clients(region) for region in data.regions] == [3, 3]
    assert len({example.source for example in everything(data, "intent")}) == 40
    assert Counter(example.task for example in everything(data)) == {
        "intent": 40,
        "spelling": 40,
        "entities": 80,
    }


def test_targets(tmp_path):
    data = small(write(tmp_path))
    intent = {example.source: example.target for example in everything(data, "intent")}
    spelling = {example.source: example.target for example in everything(data, "spelling")}
    entities = {example.source: example.target for example in everything(data, "entities")}
    assert intent["lamp 1"] == "clothing-shoes-1"
    assert spelling["gas mowe 1"] == "gas mower 1"
    assert entities["red shoe0"] == "colour other"
    assert entities["red shoe1"] == "size other"
    assert entities["red shoe2"] == "other other"


def test_a_department_is_named_by_what_tells_it_apart():
    names = ["Home & Kitchen", "Home & Garden", "Books", "Arts, Crafts", "Arts", ""]
    short = shortened(names)
    assert short["Books"] == "books"
    assert short["Home & Kitchen"] == "home-kitchen"
    assert short["Arts, Crafts"] == "arts-crafts"
    assert len(set(short.values())) == len(names)


def test_no_two_types_share_a_word():
    names = {"other", "content", "shape", "material", "condition", "quantity", "price", "origin"}
    words = list(TYPE_WORDS.values())
    assert len(set(words)) == len(words)
    assert not set(words) & names


def test_every_device_has_every_task_where_counts_allow(tmp_path):
    data = small(write(tmp_path), dirichlet=1e-3)
    for region in data.regions:
        for index in range(data.clients(region)):
            client = data.client(region, index)
            assert {example.task for example in client.train + client.test} == set(data.tasks)


def test_more_devices_than_rows(tmp_path):
    data = small(write(tmp_path), regions=8, clients_per_region=30)
    assert len(everything(data)) == 160


def test_same_seed_same_devices_and_another_seed_others(tmp_path):
    folder = write(tmp_path)
    assert small(folder, seed=5).devices == small(folder, seed=5).devices
    assert small(folder, seed=5).devices != small(folder, seed=6).devices


def test_a_full_device_keeps_all_its_tasks(tmp_path):
    folder = write(tmp_path)
    full, cut = small(folder, regions=1), small(folder, regions=1, examples_per_client=6)
    for index in range(3):
        before, after = full.client("R1", index), cut.client("R1", index)
        assert after.train == before.train[:6]
        assert after.test == before.test
        assert {e.task for e in after.train} == {e.task for e in before.train}


def test_files_directly_in_the_folder(tmp_path):
    nested, flat = write(tmp_path / "nested"), tmp_path / "flat"
    flat.mkdir()
    for subfolder, name, _ in SOURCES.values():
        (flat / name).write_bytes((nested / subfolder / name).read_bytes())
    assert small(flat).devices == small(nested).devices


def test_byte_order_mark_and_carriage_returns(tmp_path):
    plain = small(write(tmp_path))
    for place in (INTENT, SPELLING, ENTITIES):
        path = tmp_path / place
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert small(tmp_path).devices == plain.devices


def test_rows_that_cannot_be_used_are_left_out(tmp_path):
    long = " ".join(["word"] * (MAX_WORDS + 1))
    tagged = [
        {"tokens": ["one"], "labels": ["B-color"]},
        {"tokens": ["two words"], "labels": ["B-color"]},
        {"tokens": [""], "labels": ["B-color"]},
        {"tokens": [], "labels": []},
        {"tokens": long.split(), "labels": ["O"] * (MAX_WORDS + 1)},
    ]
    data = small(
        write(
            tmp_path,
            intent=f"query,category\n  ,Books\nnovel,\nNovel  Two ,Books\n{long},Books\n",
            spelling=f"typed,corrected\n,a\nb,\nSame, same \nteh,the\n{long},{long}s\n",
            entities="\n\n".join(map(json.dumps, tagged)),
        )
    )
    assert {(e.source, e.target) for e in everything(data)} == {
        ("novel two", "books"),
        (" ".join(["word"] * MAX_WORDS), "books"),
        ("teh", "the"),
        ("one", "colour"),
    }


@pytest.mark.parametrize(
    ("task", "content", "expected"),
    [
        ("entities", '{"tokens": ["a"], "labels": ["O"]}\n{"tokens"', "line 2: not JSON"),
        ("entities", "[" * 100_000, "line 1: not JSON"),
        ("entities", "[1]\n", "line 1: expected an object"),
        ("entities", '\n{"tokens": "a", "labels": ["O"]}', "line 2: 'tokens' must be a list"),
        ("entities", '{"tokens": ["a"], "labels": [3]}', "line 1: 'labels' must be a list"),
        ("entities", '{"tokens": ["a"]}', "line 1: 'labels' must be a list"),
        ("entities", '{"tokens": ["a"], "labels": ["O", "O"]}', "line 1: 1 tokens but 2 labels"),
        ("entities", '{"tokens": ["a"], "labels": ["color"]}', "line 1: label 'color' is not"),
        ("entities", b'{"tokens": []}\n\xff', "line 2: not UTF-8"),
        ("entities", "", "no usable row"),
        ("intent", "query,kind\na,b\n", "line 1: no column category; found query, kind"),
        ("intent", "", "line 1: no column query, category"),
        ("intent", "query,category\na,b\nc\n", "line 3: expected 2 fields"),
        ("intent", "query,category\n\n\na,b,c\n", "line 4: expected 2 fields"),
        ("spelling", 'typed,corrected\n"a"b,c\n', "line 2: not CSV (',' expected"),
        ("spelling", 'typed,corrected\na,"b\nc', "line 3: not CSV (unexpected end of data"),
        ("spelling", b"typed,corrected\nteh,the\n\xe9,e\n", "line 3: not UTF-8"),
    ],
)
def test_malformed_files_are_refused_with_their_line(tmp_path, task, content, expected):
    write(tmp_path, **{task: content})
    with pytest.raises(DataError) as caught:
        small(tmp_path)
    assert expected in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("place", [INTENT, SPELLING, ENTITIES])
def test_a_missing_file_is_named_with_where_it_was_looked_for(tmp_path, place):
    (write(tmp_path) / place).unlink()
    with pytest.raises(DataError) as caught:
        small(tmp_path)
    assert str(tmp_path / place) in str(caught.value)
    assert str(tmp_path / Path(place).name) in str(caught.value)


def test_no_path():
    with pytest.raises(DataError, match="set the path"):
        load(DataConfig())


@pytest.mark.parametrize("name", ["regions", "clients_per_region", "examples_per_client"])
def test_shape_out_of_range(tmp_path, name):
    with pytest.raises(DataError, match=f"{name} is 0"):
        small(write(tmp_path), **{name: 0})


def test_unknown_region_and_device(tmp_path):
    data = small(write(tmp_path))
    with pytest.raises(DataError, match=r"R3.*R1, R2"):
        data.clients("R3")
    for index in (-1, 3):
        with pytest.raises(DataError, match="0 to 2"):
            data.client("R1", index)


@pytest.mark.parametrize(
    ("typed", "corrected", "kind"),
    [
        ("outdoorlounge", "outdoor lounge", "spacing"),
        ("gas mowe", "gas mower", "omitted"),
        ("wall pannels", "wall panels", "added"),
        ("metal gcfi", "metal gfci", "swapped"),
        ("6 stell", "6 steel", "replaced"),
        ("closetmade", "closet maid", "several"),
        ("aa", "aaa", "omitted"),
    ],
)
def test_slip(typed, corrected, kind):
    assert slip(typed, corrected) == kind


def test_query_key_and_normalise():
    keys = {
        query_key(q) for q in ("Air-tight box", "air - tight  box", "AIRTIGHT BOX", "ａirtight-box")
    }
    assert keys == {"airtightbox"}
    assert query_key("!!") == "!!"
    assert normalise("  Red\tSHOES ") == "red shoes"


@needs_real_data
def test_real_files():
    data = DATASETS.load("esci")(DataConfig(path=REAL))
    assert [data.clients(region) for region in data.regions] == [10] * 8
    counts = Counter(example.task for example in everything(data))
    assert counts == {"intent": 378, "spelling": 3363, "entities": 9704}
    for task in data.tasks:
        assert len(examples(data, "test", task)) / counts[task] == pytest.approx(HELD_OUT, abs=0.04)
        for region in data.regions:
            for side in ("train", "test"):
                assert any(
                    example.task == task
                    for index in range(10)
                    for example in getattr(data.client(region, index), side)
                ), (task, region, side)


@needs_real_data
def test_real_targets():
    data = load(DataConfig(path=REAL))
    assert len({example.target for example in everything(data, "intent")}) == 25
    assert len({word for e in everything(data, "entities") for word in e.target.split()}) == 18
    for example in everything(data):
        assert 0 < len(example.source.split()) <= MAX_WORDS
        assert example.source == normalise(example.source)
        assert example.target
    for example in everything(data, "entities"):
        assert len(example.source.split()) == len(example.target.split())


@needs_real_data
@pytest.mark.parametrize("alpha", [1e-3, 1e6])
def test_real_files_at_extreme_skew(alpha):
    data = load(DataConfig(path=REAL, dirichlet=alpha, examples_per_client=50))
    assert max(len(data.client(r, n).train) for r in data.regions for n in range(10)) <= 50
    assert all(data.client(r, n).train for r in data.regions for n in range(10))
