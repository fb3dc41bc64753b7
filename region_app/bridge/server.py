"""The coordinator's end of the bridge."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from region_app.bridge.desk import Desk
from region_app.bridge.endpoint import Endpoint, is_authorised
from region_app.bridge.protocol import (
    CHUNK,
    FRAME_LIMIT,
    QUERY,
    RELAY,
    SERVICE,
    Buffer,
    Reply,
    Request,
    frames,
    read_body,
    read_header,
    size_of,
)
from regionfed.discretion import discreet
from regionfed.errors import ConfigurationError, ContractError, RegionFedError

MOST_CALLS = 8  # at a time, health checks too; an uplink makes one
OPTIONS = [
    ("grpc.max_receive_message_length", FRAME_LIMIT),
    ("grpc.so_reuseport", 0),  # a second coordinator of one region shall fail, not share the calls
]

_HEALTH = "/grpc.health.v1.Health/"
Introduce = Callable[[Request], Iterable[Buffer]]


class AddressTakenError(ConfigurationError):
    """Somebody else listens at the bridge's address."""


class BridgeServer:
    """Serves one coordinator to its uplink.

    Parameters
    ----------
    endpoint : Endpoint
    desk : Desk
        Answers what has to be computed.
    introduce : callable
        Answers a query, at once and from any thread; it raises while the region is not ready.
    check : callable
        Refuses a request of another run or of other settings, by raising.
    limit : int
        Bytes that a request may have.
    chunk : int
        Bytes of a data frame.

    Raises
    ------
    AddressTakenError
        By another coordinator of this region, it seems.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        desk: Desk,
        *,
        introduce: Introduce,
        check: Callable[[Request], None],
        limit: int,
        chunk: int = CHUNK,
    ) -> None:
        self._desk = desk
        self._introduce = introduce
        self._check = check
        self._limit = limit
        self._chunk = chunk
        self._health = health.HealthServicer()
        self._server = grpc.server(
            ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="bridge"),
            options=OPTIONS,
            interceptors=[_TokenInterceptor(endpoint.secret())],
            maximum_concurrent_rpcs=MOST_CALLS,
        )
        relay = grpc.stream_stream_rpc_method_handler(self._relay)
        handlers = grpc.method_handlers_generic_handler(SERVICE, {RELAY.rpartition("/")[2]: relay})
        self._server.add_generic_rpc_handlers((handlers,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        try:
            self.port = endpoint.listen(self._server)
        except RuntimeError as error:
            raise AddressTakenError(
                f"the bridge cannot listen at {endpoint.address} ({error}): does another "
                f"coordinator of this region run?"
            ) from None

    def __enter__(self) -> "BridgeServer":
        self._server.start()
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        return self

    def __exit__(self, *exception: object) -> None:
        self._health.enter_graceful_shutdown()
        self._server.stop(grace=None).wait(0.9)

    def _relay(self, stream: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Answer one call; what goes wrong becomes its status."""
        try:
            with discreet("the coordinator"):
                header = read_header(stream, Request, self._limit)
                self._check(header)
                body = read_body(stream, header.size)
                answer = self._answer(header, body, context.is_active)
        except TimeoutError:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the coordinator is still at it.")
        except ContractError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except RegionFedError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        yield from frames(Reply(answer[0]), answer[1], self._chunk)

    def _answer(
        self, header: Request, body: Buffer, patient: Callable[[], bool]
    ) -> tuple[int, Iterable[Buffer]]:
        if header.phase == QUERY:
            pieces = list(self._introduce(header))
            return size_of(pieces), pieces
        path = self._desk.ask(header, body, patient)
        return path.stat().st_size, _pieces(path, self._chunk)


def _pieces(path: Path, chunk: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(chunk):
            yield piece


class _TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[misc] # grpc has no types
    """Refuses a call without the token before a byte of it is read; health is for all."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

        def refuse(stream: object, context: Any) -> None:
            del stream
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the bridge asks for its token.")

        self._refusal = grpc.stream_stream_rpc_method_handler(refuse)

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        if details.method.startswith(_HEALTH) or is_authorised(
            details.invocation_metadata, self._secret
        ):
            return continuation(details)
        return self._refusal
