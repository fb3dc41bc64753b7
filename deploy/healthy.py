"""Says by its exit status whether a part of a deployment is well; what containers ask.

python -m deploy.healthy https://localhost:8000/health --ca /keys/ca.crt     a SuperLink
python -m deploy.healthy grpc://127.0.0.1:9999                               what has gRPC's check
"""

import argparse
import ssl
import sys
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SECONDS = 3.0


def is_well(url: str, authority: str = "") -> bool:
    """Ask a part how it is."""
    scheme, _, address = url.partition("://")
    return _grpc(address) if scheme == "grpc" else _https(url, authority)


def _grpc(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            found = stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        except grpc.RpcError:
            return False
    return bool(found.status == health_pb2.HealthCheckResponse.SERVING)


def _https(url: str, authority: str) -> bool:
    context = ssl.create_default_context(cafile=authority or None)
    direct = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with direct.open(url, timeout=SECONDS) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--ca", default="", help="certificate authority of an https address")
    given = parser.parse_args()
    return 0 if is_well(given.url, given.ca) else 1


if __name__ == "__main__":
    sys.exit(main())
