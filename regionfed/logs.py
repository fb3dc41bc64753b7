"""What a process logs, for people or for machines: of which run, region and round it speaks.

``REGIONFED_LOG`` chooses the form: ``text``, or ``json``, one object a line. Without it a
simulation logs as Python does by itself, warnings alone; deployed processes log text. Lines go to
standard error and, where ``REGIONFED_LOG_FILE`` names a file, to its end as well: the standard
error of a ServerApp that Flower's SuperExec starts is seen by ``flwr log`` alone.

JSON is made to be carried off the machine, but not out of the region: what a coordinator logs
names devices, and who was drawn may be a secret (docs/observability.md). It tells of an unforeseen
error what `regionfed.discretion` lets others learn, its type and where it arose, but not its text,
which may quote data.
"""

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler

from regionfed.discretion import is_for_others
from regionfed.errors import ConfigurationError
from regionfed.registry import nearest

FORM = "REGIONFED_LOG"
FILE = "REGIONFED_LOG_FILE"
TEXT, JSON = "text", "json"

_PACKAGES = ("regionfed", "strategies", "client_app", "region_app", "server_app")
_NAME = "regionfed"  # of our handlers: a process is configured once

Fields = Mapping[str, str | int]

_fields: ContextVar[Fields] = ContextVar("fields", default={})  # noqa: B039 (never written to)


@contextmanager
def log_context(**fields: str | int) -> Iterator[None]:
    """Say of all that is logged within what it is about; empty texts say nothing."""
    told = {name: value for name, value in fields.items() if value != ""}
    token = _fields.set({**_fields.get(), **told})
    try:
        yield
    finally:
        _fields.reset(token)


def configure(default: str = "", environment: Mapping[str, str] = os.environ) -> str:
    """Have this process log in the form that the environment chooses; return that.

    The first call counts. Nothing is changed where neither environment nor `default` has a form.

    Raises
    ------
    ConfigurationError
        If there is no such form.
    """
    form = environment.get(FORM, "") or default
    if not form:
        return form
    if form not in _FORMATTERS:
        raise ConfigurationError(
            f"{FORM}='{form}'{nearest(form, list(_FORMATTERS))} Allowed: {', '.join(_FORMATTERS)}."
        )
    root = logging.getLogger()
    if any(handler.name == _NAME for handler in root.handlers):
        return form
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if path := environment.get(FILE, ""):
        handlers.append(WatchedFileHandler(path, encoding="utf-8"))
    for handler in handlers:
        handler.name = _NAME
        handler.setLevel(logging.INFO)
        handler.setFormatter(_FORMATTERS[form]())
        handler.addFilter(_is_said_here if form == TEXT else _says_something)
        root.addHandler(handler)
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)
    return form


def _is_said_here(record: logging.LogRecord) -> bool:
    """Leave out what Flower says for people by itself."""
    return record.name.partition(".")[0] != "flwr"


def _says_something(record: logging.LogRecord) -> bool:
    """Leave out Flower's blank lines."""
    return bool(record.msg)


class TextFormatter(logging.Formatter):
    """A line for people: when, how grave, who, of what; then the message and what was raised."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """Return the line without what was raised."""
        about = " ".join(f"{name}={value}" for name, value in _fields.get().items())
        said = f"{_moment(record)} {record.levelname:<7} {record.name}"
        return f"{said}{f' [{about}]' if about else ''}: {record.message}"


class JsonFormatter(logging.Formatter):
    """An object a line; what is not known is left out."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        said: dict[str, object] = {
            "time": _moment(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields.get(),
        }
        if record.exc_info and (error := record.exc_info[1]) is not None:
            said["error"] = _discreet(error)
        return json.dumps(said, ensure_ascii=False)


_FORMATTERS: Mapping[str, type[logging.Formatter]] = {TEXT: TextFormatter, JSON: JsonFormatter}


def _discreet(error: BaseException) -> dict[str, object]:
    """Return what an error is and where it arose; its text only if others may read it."""
    frames = traceback.extract_tb(error.__traceback__)
    text = {"text": str(error)} if is_for_others(error) else {}
    at = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return {"type": type(error).__name__, **text, "at": at}


def _moment(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
