"""Reviews and handwritten characters in the forms in which they are published."""

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client_app.datasets import characters, reviews
from client_app.datasets.dataset import DataConfig, FederatedDataset
from client_app.datasets.spaces import spaces_of
from client_app.tasks.image import SIDE, Image, network
from regionfed.errors import DataError

SHARED = Path(__file__).resolve().parents[4] / ".." / "shared" / "data"
REAL = Path(os.environ.get("REGIONFED_DATA", SHARED))


def real(name: str) -> Path:
    """The folder of the real rows, if `name` is in it."""
    if not (REAL / name).exists():
        pytest.skip(f"no {name} under {REAL}; set REGIONFED_DATA to the folder of the real rows")
    return REAL


def sides(data: FederatedDataset) -> tuple[set[str], set[str]]:
    clients = [data.client(r, i) for r in data.regions for i in range(data.clients(r))]
    train = {e.group for c in clients for e in c.train}
    return train, {e.group for c in clients for e in c.test}


# -------------------------------------------------------------------------------------- reviews
def review(i: int, **changed: Any) -> dict[str, Any]:
    """One review with the columns of Amazon Reviews 2023."""
    return {
        "rating": float(1 + i % 5),
        "title": f"title {i}",
        "text": f"some<br />text {i}",
        "images": [],
        "asin": f"B{i}",
        "parent_asin": f"P{i % 11}",
        "user_id": f"U{i % 6}",
        "timestamp": 1588687728923,
        "helpful_vote": 0,
        "verified_purchase": True,
        **changed,
    }


def published(folder: Path) -> Path:
    for category in ("Books", "All_Beauty"):
        lines = [json.dumps(review(i)) for i in range(60)]
        (folder / f"{category}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_a_category_is_a_region_and_a_user_on_one_device(tmp_path: Path) -> None:
    """As Amazon Reviews 2023 is published."""
    data = reviews.load(DataConfig(published(tmp_path), regions=5, clients_per_region=4))
    assert data.regions == ("All_Beauty", "Books") and data.tasks == ("stars",)
    assert data.clients("Books") == 4
    owners = [
        {int(e.source.rpartition(" ")[2]) % 6 for e in (*c.train, *c.test)}
        for c in (data.client("Books", i) for i in range(4))
    ]
    assert sum(map(len, owners)) == 6
    train, test = sides(data)
    assert train and test and not train & test
    first = data.client("Books", 0)
    assert all("some text" in e.source for e in (*first.train, *first.test))
    assert reviews.missing(data) == {}


def test_a_review_without_words_is_left_out_and_one_without_stars_refused(tmp_path: Path) -> None:
    """Published rows may be empty; a rating that is none names its line."""
    path = published(tmp_path) / "Books.jsonl"
    path.write_text(json.dumps(review(0, title="", text=" ")) + "\n" + json.dumps(review(1)) + "\n")
    assert len(reviews.read(tmp_path)["Books"]) == 1
    path.write_text(json.dumps(review(0)) + "\n" + json.dumps(review(1, rating=9)) + "\n")
    with pytest.raises(DataError, match="line 2: 'rating' must be 1 to 5"):
        reviews.read(tmp_path)
    with pytest.raises(DataError, match="Correct the path"):
        reviews.read(tmp_path / "nowhere")


def test_a_review_without_a_user_among_others_is_refused(tmp_path: Path) -> None:
    """A user's reviews would be drawn to several devices otherwise."""
    lines = [json.dumps(review(i, **({"user_id": ""} if i == 3 else {}))) for i in range(9)]
    (tmp_path / "Books.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"line 4: no user_id.*1 of 9"):
        reviews.load(DataConfig(tmp_path))


def test_a_category_is_a_file_s_whole_name(tmp_path: Path) -> None:
    """Two files never make one region because of a point in their names."""
    for name in ("Books.2022.jsonl", "Books.2023.jsonl"):
        (tmp_path / name).write_text(json.dumps(review(0)) + "\n")
    assert sorted(reviews.read(tmp_path)) == ["Books.2022", "Books.2023"]


def test_real_reviews_and_what_they_lack() -> None:
    """Five regions; the four old ones have no review of three stars, and that is said."""
    data = reviews.load(DataConfig(real("blitzer_amazon_reviews"), regions=5))
    assert data.regions == ("books", "devices", "dvd", "electronics", "kitchen")
    old = ("books", "dvd", "electronics", "kitchen")
    assert reviews.missing(data) == {region: ["3"] for region in old}
    train, test = sides(data)
    assert train and test and not train & test
    assert min(len(data.client(r, i).train) for r in data.regions for i in range(10)) > 0


# ----------------------------------------------------------------------------------- characters
def leaf(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    users = {
        f"f{n:04d}_00": {"x": rng.random((6, SIDE * SIDE)).tolist(), "y": [0, 10, 36, 61, 5, 5]}
        for n in range(5)
    }
    stated = {"users": list(users), "num_samples": [6] * 5, "user_data": users}
    (folder / "all_data_0.json").write_text(json.dumps(stated))
    return folder


def test_leaf_s_json_is_read(tmp_path: Path) -> None:
    """784 numbers with 1 for paper become ink; a writer is on one device."""
    config = DataConfig(leaf(tmp_path), regions=2, clients_per_region=3)
    data = characters.load_femnist(config)
    assert data.regions == ("R1", "R2") and sum(map(data.clients, data.regions)) == 5
    space = spaces_of(data)["character"]
    assert len(space.labels) == 62 and space.labels[10] == "A" and space.labels[36] == "a"
    client = data.client("R1", 0)
    examples = [*client.train, *client.test]
    assert len(examples) == 6 and {e.target for e in examples} == {"0", "A", "a", "z", "5"}
    task = Image(network((4, 4), 4, 62), "character", space)
    pixels = json.loads((tmp_path / "all_data_0.json").read_text())["user_data"]["f0000_00"]["x"]
    expected = 1.0 - torch.tensor(pixels[0]).reshape(SIDE, SIDE)
    mine = [e for r in data.regions for i in range(data.clients(r)) for e in
            (*data.client(r, i).train, *data.client(r, i).test) if e.target == "0"]  # fmt: skip
    found = task.encode(mine)["pixels"][:, 0]
    assert any(torch.allclose(image, expected, atol=1 / 255) for image in found)


def test_the_hub_s_parquet_is_read(tmp_path: Path) -> None:
    """PNGs, black on white; regions are the hub's partitions, clients its writers."""
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")
    from PIL import Image as Pillow
    from pyarrow import parquet

    def png(value: int) -> bytes:
        file = io.BytesIO()
        Pillow.fromarray(np.full((SIDE, SIDE), value, np.uint8)).save(file, "PNG")
        return file.getvalue()

    table = [
        {
            "image": {"bytes": png(i), "path": None},
            "writer_id": f"w{i % 4}",
            "hsf_id": i % 2,
            "character": i % 62,
        }
        for i in range(40)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "train.parquet")
    data = characters.load_femnist(DataConfig(tmp_path))
    assert data.regions == ("hsf0", "hsf1") and data.clients("hsf0") == 2
    total = sum(
        len(c.train) + len(c.test)
        for r in data.regions
        for c in (data.client(r, i) for i in range(data.clients(r)))
    )
    assert total == 40


def test_errors_about_images_say_where(tmp_path: Path) -> None:
    """A wrong size, a wrong label, no file."""
    leaf(tmp_path)
    path = tmp_path / "all_data_0.json"
    stated = json.loads(path.read_text())
    stated["user_data"]["f0000_00"]["y"][2] = 62
    path.write_text(json.dumps(stated))
    with pytest.raises(DataError, match=r"user f0000_00, image 3.*label from 0 to 61"):
        characters.load_femnist(DataConfig(tmp_path))
    stated["user_data"]["f0000_00"]["x"][0] = [0.0] * 10
    path.write_text(json.dumps(stated))
    with pytest.raises(DataError, match="image 1: expected 784"):
        characters.load_femnist(DataConfig(tmp_path))
    with pytest.raises(DataError, match="Correct"):
        characters.load_femnist(DataConfig(tmp_path / "nothing"))
    with pytest.raises(DataError, match="unipen"):
        characters.load_unipen(DataConfig(tmp_path))


def test_femnist_is_found_by_its_name_among_other_datasets(tmp_path: Path) -> None:
    """Other people's json beside it is not read; below a folder of its own, all is."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "products.json").write_text("{}")
    (tmp_path / "femnist" / "data" / "train").mkdir(parents=True)
    leaf(tmp_path / "femnist" / "data" / "train")
    config = DataConfig(tmp_path, regions=2)
    assert sum(map(characters.load_femnist(config).clients, ("R1", "R2"))) == 5
    (tmp_path / "femnist").rename(tmp_path / "other" / "written")
    with pytest.raises(DataError, match=r"products\.json is no LEAF file"):
        characters.load_femnist(config)


def test_femnist_is_found_from_the_root_of_the_real_data() -> None:
    """Where all sets of `REGIONFED_DATA` lie side by side."""
    data = characters.load_femnist(DataConfig(real("femnist_digits_sample"), regions=4))
    assert sum(map(data.clients, data.regions)) == 12


def test_real_characters_are_read() -> None:
    """FEMNIST's small sample has ten digits; UNIPEN has ten donors and 62 classes."""
    folder = real("femnist_digits_sample")
    data = characters.load_femnist(DataConfig(folder / "femnist_digits_sample", regions=4))
    assert len(data.regions) == 4 and sum(map(data.clients, data.regions)) == 12
    real("unipen62")
    data = characters.load_unipen(DataConfig(folder / "unipen62", regions=10))
    assert len(data.regions) == 10 and "aga" in data.regions
    clients = [data.client(r, i) for r in data.regions for i in range(data.clients(r))]
    assert {e.target for c in clients for e in c.train} == set(characters.CLASSES)
    train, test = sides(data)
    assert train and test and not train & test
