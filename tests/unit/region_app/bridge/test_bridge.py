"""Both ends of the bridge over a real socket: chunks, tokens, TLS, deadlines, one reply each."""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from deploy.keys import make_authority, make_certificate
from region_app.bridge.client import OPTIONS, BridgeClient, is_healthy
from region_app.bridge.desk import Desk, ReplyStore
from region_app.bridge.endpoint import Endpoint, authorisation
from region_app.bridge.protocol import RELAY, Buffer, Request, frames, pack, unpack
from region_app.bridge.server import AddressTakenError, BridgeServer
from regionfed.errors import ContractError, RunError
from regionfed.vector import from_arrays, to_arrays

LIMIT = 1 << 20
SETTINGS: dict[str, Any] = {"seed": 0}


def records(value: float = 1.0, size: int = 8, round_: int = 1) -> RecordDict:
    return RecordDict(
        {
            "config": ConfigRecord({"round": round_}),
            "arrays": ArrayRecord(to_arrays("v", torch.full((size,), value))),
        }
    )


def value_of(found: RecordDict) -> float:
    return float(from_arrays("v", found["arrays"], None)[0])  # type: ignore[arg-type]


class Region:
    """A coordinator that counts: its reply is its own, and how often it was asked."""

    def __init__(self, folder: Path, token: Path, tls: tuple[Path, Path] | None = None) -> None:
        self.folder, self.token = folder, token
        self.tls = tls or (None, None)
        self.asked: list[Request] = []
        self.error: Exception | None = None
        self.hold = threading.Event()
        self.hold.set()
        self.port = 0

    def answer(self, request: Request, body: Buffer) -> Iterable[Buffer]:
        assert value_of(unpack(body)) == 1.0
        self.asked.append(request)
        self.hold.wait(10.0)
        if self.error is not None:
            raise self.error
        return pack(records(10.0 + len(self.asked), size=1000))

    def check(self, request: Request) -> None:
        if request.run != "trial":
            raise RunError(f"this is not run '{request.run}'.")

    @contextmanager
    def open(self, *, port: int = 0, chunk: int = 64) -> Iterator[Endpoint]:
        """Serve until the end of the block."""
        desk = Desk(self.answer, ReplyStore(self.folder))
        ours = Endpoint(f"127.0.0.1:{port}", self.token, self.tls[0])
        over = threading.Event()
        worker = threading.Thread(
            target=desk.serve, args=(lambda: "over" if over.is_set() else "",)
        )
        server = BridgeServer(
            ours,
            desk,
            introduce=lambda _: pack(records(7.0)),
            check=self.check,
            limit=LIMIT,
            chunk=chunk,
        )
        worker.start()
        try:
            with server:
                self.port = server.port
                yield Endpoint(f"127.0.0.1:{server.port}", self.token, self.tls[1])
        finally:
            self.hold.set()
            over.set()
            worker.join()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("t" * 40)
    return path


@pytest.fixture
def region(tmp_path: Path, token: Path) -> Region:
    return Region(tmp_path / "replies", token)


def ask(endpoint: Endpoint, **changes: Any) -> float:
    given: dict[str, Any] = {
        **{"run": "trial", "round_": 1, "phase": "train", "settings": SETTINGS, "timeout": 10.0},
        **changes,
    }
    content = given.pop("content", records())
    limit = given.pop("limit", LIMIT)
    return value_of(BridgeClient(endpoint, limit=limit, chunk=64).relay(content, **given))


def test_a_request_and_its_reply_cross_in_tiny_chunks(region: Region) -> None:
    """F4: the reply has 4 kB, a frame 64 bytes."""
    with region.open() as endpoint:
        assert ask(endpoint) == 11.0
    assert [(r.run, r.round, r.phase, r.settings) for r in region.asked] == [
        ("trial", 1, "train", SETTINGS)
    ]


def test_d10_a_retry_gets_the_very_same_reply(region: Region) -> None:
    """D10.

    A retried message draws fresh noise for the same round. -> replies are idempotent by run, round
    and phase, also after the coordinator has been started again.
    """
    with region.open() as endpoint:
        first = ask(endpoint)
        assert ask(endpoint) == first
    kept = (region.folder / "train-1.reply").read_bytes()
    with region.open() as endpoint:
        assert ask(endpoint) == first
        assert (region.folder / "train-1.reply").read_bytes() == kept
        assert ask(endpoint, phase="evaluate") == first + 1.0  # another phase is another question
    assert len(region.asked) == 2


def test_a_later_round_acknowledges_the_earlier(region: Region) -> None:
    """The disk holds one reply a phase, and what is older than it is a replay."""
    with region.open() as endpoint:
        for round_ in (1, 2, 3):
            ask(endpoint, round_=round_)
        ask(endpoint, round_=3, phase="evaluate")
        names = sorted(path.name for path in region.folder.glob("*.reply"))
        assert names == ["evaluate-3.reply", "train-3.reply"]
        with pytest.raises(RunError, match="a replay"):
            ask(endpoint, round_=2)
    assert len(region.asked) == 4


def test_two_who_ask_at_once_share_one_answer(region: Region) -> None:
    """The first has given up on its connection, but its work goes on."""
    region.hold.clear()
    found: list[float] = []
    with region.open() as endpoint:
        threads = [threading.Thread(target=lambda: found.append(ask(endpoint))) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        region.hold.set()
        for thread in threads:
            thread.join()
    assert found == [11.0] * 3 and len(region.asked) == 1


def test_a_deadline_ends_the_wait_and_keeps_the_work(region: Region) -> None:
    """Whoever asks again later has the reply that was being made."""
    region.hold.clear()
    with region.open() as endpoint:
        with pytest.raises(RunError, match=r"DEADLINE_EXCEEDED|within"):
            ask(endpoint, timeout=0.5)
        region.hold.set()
        assert ask(endpoint) == 11.0
    assert len(region.asked) == 1


def test_a_coordinator_that_comes_back_is_found_again(region: Region) -> None:
    """It is down when it is asked, and started afterwards at the same place."""
    with region.open():
        port = region.port
    found: list[float] = []
    endpoint = Endpoint(f"127.0.0.1:{port}", region.token)
    thread = threading.Thread(target=lambda: found.append(ask(endpoint, timeout=20.0)))
    thread.start()
    time.sleep(0.3)
    with region.open(port=port):
        thread.join()
    assert found == [11.0]


def test_a_coordinator_that_never_comes_is_named(token: Path) -> None:
    with pytest.raises(RunError, match=r"did not answer within 1 s .*region's SuperLink"):
        ask(Endpoint("127.0.0.1:1", token), timeout=1.0)


def test_a_query_is_answered_at_once_and_kept_nowhere(region: Region) -> None:
    with region.open() as endpoint:
        assert ask(endpoint, phase="query", round_=0) == 7.0
    assert not region.asked and not region.folder.exists()


def test_another_run_is_refused(region: Region) -> None:
    with region.open() as endpoint, pytest.raises(RunError, match="this is not run 'other'"):
        ask(endpoint, run="other")
    assert not region.asked


def test_a_refusal_is_told_and_anything_else_is_not(region: Region) -> None:
    """Our own errors are written for others; the text of any other may quote data."""
    with region.open() as endpoint:
        region.error = RunError("region North sits out.")
        with pytest.raises(RunError, match=r"^region North sits out\.$"):
            ask(endpoint)
        region.error = ValueError("row 3 of Ada's queries")
        with pytest.raises(RunError, match="ValueError") as told:
            ask(endpoint)
        assert "Ada" not in str(told.value)
        region.error = None  # what failed is tried again
        assert ask(endpoint) == 13.0


def test_a_full_disk_refuses_the_reply_and_a_retry_makes_it(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reply leaves that is not kept."""

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with region.open() as endpoint:
        with monkeypatch.context() as patch:
            patch.setattr("region_app.bridge.desk.replacing", full)
            with pytest.raises(RunError, match="OSError"):
                ask(endpoint)
        assert ask(endpoint) == 12.0


def test_a_call_without_the_token_is_refused_unread(region: Region, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.touch(mode=0o600)
    wrong.write_text("x" * 40)
    with region.open() as endpoint:
        with pytest.raises(RunError, match="asks for its token"):
            ask(Endpoint(endpoint.address, wrong))
        with grpc.insecure_channel(endpoint.address) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                next(channel.stream_stream(RELAY)(iter([b"H{}"]), timeout=5.0))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not region.asked


def test_too_large_and_malformed_are_refused(region: Region) -> None:
    with region.open() as endpoint:
        with pytest.raises(ContractError, match="over the limit"):
            ask(endpoint, content=records(size=LIMIT))
        with pytest.raises(ContractError, match="over the limit"):
            ask(endpoint, phase="query", limit=100)
        with endpoint.connect(OPTIONS) as channel:
            for sent in (
                [b"H{}"],
                [b"D1"],
                [],
                list(frames(Request("trial", 1, "train", 4, {}), [])),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    next(
                        channel.stream_stream(RELAY)(
                            iter(sent), timeout=5.0, metadata=authorisation("t" * 40)
                        )
                    )
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not region.asked


def test_a_second_coordinator_of_a_region_does_not_start(region: Region) -> None:
    """Two would share the calls, and a budget that each believes to be its own."""
    with (
        region.open(),
        pytest.raises(AddressTakenError, match="another"),
        region.open(port=region.port),
    ):
        pass


def test_health_needs_no_token(region: Region) -> None:
    with region.open() as endpoint:
        assert is_healthy(endpoint)
    assert not is_healthy(endpoint, 0.5)


def test_mutual_tls(tmp_path: Path, token: Path) -> None:
    """Both ends show a certificate of one authority; without, no call gets through."""
    ours, theirs, strange = tmp_path / "ours", tmp_path / "theirs", tmp_path / "strange"
    for authority in (ours, strange):
        make_authority(authority, "bridge")
        make_certificate(authority, authority, ("127.0.0.1",))
    make_certificate(theirs, ours, ("127.0.0.1",))
    region = Region(tmp_path / "replies", token, (ours, theirs))
    with region.open() as endpoint:
        assert ask(endpoint) == 11.0
        for folder in (strange, None):
            with pytest.raises(RunError, match="did not answer"):
                ask(Endpoint(endpoint.address, token, folder), timeout=1.0, round_=2)
    assert len(region.asked) == 1
