"""The uplink's end of the bridge."""

import time
from collections.abc import Iterator
from typing import Any

import grpc
from flwr.app import RecordDict
from grpc_health.v1 import health_pb2, health_pb2_grpc

from region_app.bridge.endpoint import Endpoint, authorisation
from region_app.bridge.protocol import (
    CHUNK,
    FRAME_LIMIT,
    RELAY,
    Buffer,
    Reply,
    Request,
    frames,
    pack,
    read_body,
    read_header,
    size_of,
    unpack,
)
from regionfed.config import Value
from regionfed.errors import ContractError, RunError

OPTIONS = [("grpc.max_receive_message_length", FRAME_LIMIT), ("grpc.enable_retries", 0)]
PAUSE = 0.5  # seconds before a coordinator that is not there is asked again

# The coordinator is restarting, or the connection broke: the same request again is harmless.
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
_REFUSED = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED)


class BridgeClient:
    """Asks one region's coordinator.

    Parameters
    ----------
    endpoint : Endpoint
    limit : int
        Bytes that a reply may have.
    chunk : int
        Bytes of a data frame.
    """

    def __init__(self, endpoint: Endpoint, *, limit: int, chunk: int = CHUNK) -> None:
        self._endpoint = endpoint
        self._metadata = authorisation(endpoint.secret())
        self._limit = limit
        self._chunk = chunk

    def relay(
        self,
        records: RecordDict,
        *,
        run: str,
        round_: int,
        phase: str,
        settings: dict[str, Value],
        timeout: float,
    ) -> RecordDict:
        """Return the coordinator's reply to the records of a message.

        A coordinator that goes away meanwhile is asked again until `timeout` seconds are over: it
        answers a round once, and gives the same reply ever after.

        Raises
        ------
        RunError
            If it refuses, or is not there in time.
        ContractError
            If one end does not understand the other.
        """
        body = pack(records)
        header = Request(run, round_, phase, size_of(body), settings)
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            try:
                return unpack(self._call(header, body, max(left, 0.0)))
            except grpc.RpcError as error:
                code, why = error.code(), error.details()
                if code in _REFUSED:
                    raise RunError(why) from None
                if code not in _PASSING:
                    where = f"bridge to {self._endpoint.address}"
                    kind = ContractError if code is grpc.StatusCode.INVALID_ARGUMENT else RunError
                    raise kind(f"{where}: {why} ({code.name})") from None
                if left <= PAUSE:
                    raise RunError(
                        f"the coordinator at {self._endpoint.address} did not answer within "
                        f"{timeout:g} s ({code.name}). Its run must be started on the region's "
                        f"SuperLink."
                    ) from None
                time.sleep(PAUSE)

    def _call(self, header: Request, body: list[Buffer], timeout: float) -> bytearray:
        # A channel of its own per attempt: a broken one would wait before it connects again.
        with self._endpoint.connect(OPTIONS) as channel:
            call: Any = channel.stream_stream(RELAY)
            stream: Iterator[bytes] = call(
                frames(header, body, self._chunk), timeout=timeout, metadata=self._metadata
            )
            reply = read_header(stream, Reply, self._limit)
            return read_body(stream, reply.size)


def is_healthy(endpoint: Endpoint, timeout: float = 3.0) -> bool:
    """Ask a bridge whether it serves, by gRPC's standard health check; this needs no token."""
    with endpoint.connect(OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            found = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError:
            return False
    return bool(found.status == health_pb2.HealthCheckResponse.SERVING)
