"""Where a bridge is, and who may use it: a token, and mutual TLS unless it stays on one machine."""

import hmac
import ipaddress
import stat
from dataclasses import dataclass
from pathlib import Path

import grpc

from regionfed.errors import ConfigurationError

AUTHORITY, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
LEAST_TOKEN = 32  # characters


@dataclass(frozen=True)
class Endpoint:
    """One end of a bridge.

    Attributes
    ----------
    address : str
        ``host:port``; the coordinator listens there.
    token : Path
        File with the secret that both ends share, `LEAST_TOKEN` characters at least.
    tls : Path or None
        Folder with ``ca.crt``, ``tls.crt`` and ``tls.key``. Both ends prove by them who they are.
        None is for an address of this machine alone.

    Raises
    ------
    ConfigurationError
        If bytes would leave the machine in the clear.
    """

    address: str
    token: Path
    tls: Path | None = None

    def __post_init__(self) -> None:
        if self.tls is None and not is_loopback(self.address):
            raise ConfigurationError(
                f"bridge at {self.address}: that is not this machine, so that it needs mutual TLS. "
                f"Name a folder with {AUTHORITY}, {CERTIFICATE} and {KEY}, or use 127.0.0.1."
            )

    def secret(self) -> str:
        """Read the token.

        Raises
        ------
        ConfigurationError
            If it is missing, too short, or readable by everybody.
        """
        try:
            if self.token.stat().st_mode & stat.S_IROTH:
                raise ConfigurationError(f"{self.token} is readable by all: chmod 600.")
            secret = self.token.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"no bridge token in {self.token}: {error}.") from None
        if len(secret) < LEAST_TOKEN:
            raise ConfigurationError(
                f"the bridge token in {self.token} has fewer than {LEAST_TOKEN} characters: "
                f"python -c 'import secrets; print(secrets.token_hex(32))' makes one."
            )
        return secret

    def listen(self, server: grpc.Server) -> int:
        """Let a server listen here; return its port."""
        if self.tls is None:
            return int(server.add_insecure_port(self.address))
        authority, certificate, key = self._files(self.tls)
        credentials = grpc.ssl_server_credentials(
            [(key, certificate)], root_certificates=authority, require_client_auth=True
        )
        return int(server.add_secure_port(self.address, credentials))

    def connect(self, options: list[tuple[str, int]]) -> grpc.Channel:
        """Return a channel to here; it connects when it is used."""
        if self.tls is None:
            return grpc.insecure_channel(self.address, options)
        authority, certificate, key = self._files(self.tls)
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        return grpc.secure_channel(self.address, credentials, options)

    @staticmethod
    def _files(folder: Path) -> tuple[bytes, bytes, bytes]:
        try:
            authority, certificate, key = (
                (folder / name).read_bytes() for name in (AUTHORITY, CERTIFICATE, KEY)
            )
        except OSError as error:
            raise ConfigurationError(f"bridge certificates: {error}.") from None
        return authority, certificate, key


def is_loopback(address: str) -> bool:
    """Say whether an address is reached from this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def authorisation(secret: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that a call carries."""
    return (("authorization", f"Bearer {secret}"),)


def is_authorised(metadata: object, secret: str) -> bool:
    """Compare a call's metadata with the secret, in constant time."""
    given = dict(metadata or ()).get("authorization", "")  # type: ignore[call-overload]
    if not isinstance(given, str):
        return False
    return hmac.compare_digest(given.encode(), f"Bearer {secret}".encode())
