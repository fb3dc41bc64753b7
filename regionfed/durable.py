"""Files that survive a crash: whole or absent, and on the disk before the call returns."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

if sys.platform == "win32":  # pragma: no cover
    import msvcrt
else:
    import fcntl


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file; a reader, now or after a crash, sees the old or the new whole.

    What is written there takes the place of `path` at the end; after an error nothing does. It is
    in a folder of its own, with whatever else a library leaves there when it is killed: the next
    attempt clears it away. Who may read it, the process says (umask), not the library.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    new = folder / path.name
    try:
        new.touch()
        mode = new.stat().st_mode
        yield new
        new.chmod(mode)
        with new.open("rb+") as file:
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sync_folder(path.parent)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file whole; see `replacing`."""
    with replacing(path) as new:
        new.write_bytes(data)


def sync_folder(path: Path) -> None:
    """Put a new name in a folder on the disk; Windows cannot open a folder, nor needs to."""
    if os.name == "nt":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def append_line(path: Path, line: str) -> None:
    """Append one line and return when it is on the disk.

    A last line that a crash cut short is dropped first: it never was one.
    """
    data = encode_text(line + "\n")
    if not path.exists():
        write_atomic(path, data)  # a new name has to reach the disk too
        return
    with path.open("rb+") as file:
        file.truncate(_end_of_lines(file))
        file.seek(0, os.SEEK_END)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a file for this process and thread alone; others that ask wait their turn.

    The system lets go when the holder ends, however it does. The lock is a file beside it, for the
    file itself may be replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("ab") as file:
        if sys.platform == "win32":  # pragma: no cover
            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file lets go


def encode_text(text: str) -> bytes:
    """Return UTF-8; an exception's text may hold half a character, and must not fail here."""
    return text.encode("utf-8", errors="replace")


def _end_of_lines(file: BinaryIO) -> int:
    """Return where the last whole line ends; reads the file only if that is not its end."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 1, 0))
    if file.read() in {b"", b"\n"}:
        return size
    file.seek(0)
    return file.read().rfind(b"\n") + 1


def read_lines(path: Path) -> list[str]:
    """Return the whole lines of a file; one that a crash cut short is not, and no file has none.

    Only a newline ends a line: text may hold other characters that Python splits at.
    """
    if not path.exists():
        return []
    return [line.decode() for line in path.read_bytes().split(b"\n")[:-1] if line.strip()]
