"""What is written survives a crash, whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from regionfed.durable import append_line, read_lines, replacing, write_atomic
from regionfed.errors import RunError
from regionfed.tensors import load_state, save_state


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    """The new content stands alone, and no temporary file is left."""
    path = tmp_path / "new" / "file"
    write_atomic(path, b"a longer first version")
    write_atomic(path, b"second")
    assert path.read_bytes() == b"second"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("failing", ["fsync", "write"])
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """A full disk costs the new version only."""
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if failing == "fsync":
            patch.setattr(os, "fsync", full)
        else:
            patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space"):
            write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_write_left_is_cleared_away_by_the_next(tmp_path: Path) -> None:
    """Whatever name a library gave it: it is in the folder of that write alone."""
    path = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt), replacing(path) as new:
        folder = new.parent
        raise KeyboardInterrupt
    folder.mkdir()
    (folder / ".tmpXyZ").write_bytes(b"half a model")
    save_state(path, TENSORS, FACTS)
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


@pytest.mark.skipif(os.name == "nt", reason="modes are those of POSIX")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_who_may_read_a_file_the_process_says(tmp_path: Path, umask: int, mode: int) -> None:
    """Not the library that wrote it: safetensors would make every state its owner's alone."""
    before = os.umask(umask)
    try:
        save_state(tmp_path / "state", TENSORS, FACTS)
        write_atomic(tmp_path / "bytes", b"x")
    finally:
        os.umask(before)
    for name in ("state", "bytes"):
        assert (tmp_path / name).stat().st_mode & 0o777 == mode


def test_a_write_is_on_the_disk_before_its_name_and_both_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data is flushed, then named, then the name is flushed."""
    steps: list[str] = []
    sync, rename = os.fsync, Path.replace

    def fsync(fd: int) -> None:
        steps.append("sync folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "sync file")  # noqa: PTH112
        sync(fd)

    def replace(self: Path, target: Path) -> Path:
        steps.append("name")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_atomic(tmp_path / "file", b"data")
    assert steps == ["sync file", "name", "sync folder"]


def test_a_line_is_appended_and_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When `append_line` returns, the line is on the disk."""
    synced: list[bytes] = []
    path = tmp_path / "lines"
    append_line(path, "one")
    sync = os.fsync

    def fsync(fd: int) -> None:
        sync(fd)
        synced.append(path.read_bytes())

    monkeypatch.setattr(os, "fsync", fsync)
    append_line(path, "two")
    assert synced[-1] == path.read_bytes() == b"one\ntwo\n"


def test_a_line_that_a_crash_cut_short_is_dropped(tmp_path: Path) -> None:
    """A reader does not see it, and the next line does not join it."""
    path = tmp_path / "lines"
    append_line(path, "one")
    with path.open("ab") as file:
        file.write('{"half": "é'.encode()[:-1])
    assert read_lines(path) == ["one"]
    append_line(path, "two")
    assert read_lines(path) == ["one", "two"]
    assert path.read_bytes() == b"one\ntwo\n"


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    """Absent is empty."""
    assert read_lines(tmp_path / "none") == []


TENSORS = {
    "vector": torch.linspace(-1.0, 1.0, 7),
    "scalar": torch.tensor(5),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "empty": torch.zeros(0),
}
FACTS = {"round": 3, "rho": 0.1 + 0.2, "name": "é", "nothing": None}


def test_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Values, dtypes, 0-d shapes and facts."""
    path = tmp_path / "state.safetensors"
    save_state(path, TENSORS, FACTS)
    tensors, facts = load_state(path)
    assert facts == FACTS
    assert set(tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape
        assert torch.equal(tensors[name], tensor)


def test_tensors_that_share_memory_are_saved(tmp_path: Path) -> None:
    """theta and its average are one tensor until they part; both are restored."""
    theta = torch.arange(4.0)
    save_state(tmp_path / "s", {"theta": theta, "average": theta, "part": theta[1:3]}, {})
    tensors, _ = load_state(tmp_path / "s")
    assert torch.equal(tensors["average"], theta) and torch.equal(tensors["part"], theta[1:3])


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_a_damaged_state_is_refused_by_name(tmp_path: Path, cut: int) -> None:
    """Cut anywhere, the error says which file."""
    path = tmp_path / "state.safetensors"
    save_state(path, TENSORS, FACTS)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(RunError, match=r"state\.safetensors"):
        load_state(path)


def test_a_missing_or_foreign_state_is_refused_by_name(tmp_path: Path) -> None:
    """So is a file that is none of ours."""
    with pytest.raises(RunError, match="none"):
        load_state(tmp_path / "none")
    (tmp_path / "foreign").write_text(json.dumps({"a": 1}))
    with pytest.raises(RunError, match="foreign"):
        load_state(tmp_path / "foreign")
