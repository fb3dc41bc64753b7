"""Makes the keys and certificates of a deployment; what exists is kept.

    python -m deploy.keys FOLDER --regions UK US --devices 2 [--host NAME ...]

Each SuperLink has a certificate authority of its own, so that one region's keys open nothing in
another. Every folder below is what one party gets, and all that it gets::

    <link>/authority/       ca.crt, ca.key               nobody but whoever makes keys
    <link>/superlink/       ca.crt, tls.crt, tls.key, superexec.secret
    <link>/proxy/           ca.crt, tls.crt, tls.key
    <link>/operator/        ca.crt, <node>.pub           to enrol nodes and to submit runs
    <link>/nodes/<node>/    ca.crt, key                  one SuperNode each
    <region>/coordinator/   ca.crt, tls.crt, tls.key, bridge.token, site.toml
    <region>/uplink/        the same for the other end of the bridge, without site.toml

where a link is ``world``, whose nodes are the regions' uplinks, or a region, whose nodes are
``device-0`` and so on. Certificates name their hosts as subject alternative names; node keys are
ECDSA P-384 in OpenSSH's format, as Flower wants them. Private keys are readable by their owner.
"""

import argparse
import hashlib
import ipaddress
import json
import secrets
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from regionfed.errors import ConfigurationError

WORLD = "world"
LOCAL = ("localhost", "127.0.0.1")
SITE = """\
# What the region's operator says of it: docs/deployment.md. The paths are those of the containers.
region = {region}
folder = "/region"

[bridge]
address = "0.0.0.0:9095"
token = "/bridge/bridge.token"
tls = "/bridge"
"""
AUTHORITY_DAYS, CERTIFICATE_DAYS = 3650, 825


def make_deployment(
    folder: Path, regions: Sequence[str], devices: int, hosts: Sequence[str] = ()
) -> None:
    """Make everything that one world with these regions needs.

    Parameters
    ----------
    folder : Path
    regions : sequence of str
    devices : int
        Node keys per region.
    hosts : sequence of str
        Further names or addresses under which the SuperLinks are reached.

    Raises
    ------
    ConfigurationError
        If two parties would have one name.
    """
    names = service_names(regions)
    _make_superlink(folder / WORLD, WORLD, regions, hosts)
    for region, name in names.items():
        _make_superlink(folder / region, name, [f"device-{i}" for i in range(devices)], hosts)
        _make_bridge(folder / region, (f"coordinator-{name}", *LOCAL, *hosts))
        site = folder / region / "coordinator" / "site.toml"
        if not site.exists():
            _write_public(site, SITE.format(region=json.dumps(region)).encode())


def service_name(region: str) -> str:
    """Return a region's name as part of a host name, which knows ASCII alone."""
    plain = unicodedata.normalize("NFKD", region).encode("ascii", "ignore").decode().lower()
    name = "".join(c if c.isalnum() else "-" for c in plain).strip("-")
    return name or hashlib.sha256(region.encode()).hexdigest()[:8]


def service_names(regions: Sequence[str]) -> dict[str, str]:
    """Return each region's name as part of a host name.

    Raises
    ------
    ConfigurationError
        If two regions, or a region and the world, would have one: they would share hosts and
        volumes.
    """
    known = {WORLD: "the world"}
    names = {}
    for region in regions:
        name = service_name(region)
        if name in known:
            raise ConfigurationError(
                f"{known[name]} and region '{region}' would both be '{name}' among hosts: rename "
                f"the region."
            )
        known[name] = f"region '{region}'"
        names[region] = name
    return names


def _make_superlink(folder: Path, name: str, nodes: Sequence[str], hosts: Sequence[str]) -> None:
    authority = folder / "authority"
    make_authority(authority, f"RegionFed {name}")
    for party in ("superlink", "proxy"):
        make_certificate(folder / party, authority, (f"{party}-{name}", party, *LOCAL, *hosts))
    _write_secret(folder / "superlink" / "superexec.secret", secrets.token_hex(32))
    _copy(authority / "ca.crt", folder / "operator")
    for node in nodes:
        make_node_key(folder / "nodes" / node / "key", folder / "operator" / f"{node}.pub")
        _copy(authority / "ca.crt", folder / "nodes" / node)


def _make_bridge(folder: Path, hosts: Sequence[str]) -> None:
    # An authority of its own: a SuperLink's certificate opens no bridge.
    authority = folder / "bridge-authority"
    make_authority(authority, f"RegionFed bridge of {folder.name}")
    token = secrets.token_hex(32)
    for end in ("coordinator", "uplink"):
        make_certificate(folder / end, authority, hosts)
        if (kept := folder / "coordinator" / "bridge.token").exists():
            token = kept.read_text("ascii")
        _write_secret(folder / end / "bridge.token", token)


def make_authority(folder: Path, name: str) -> None:
    """Make ``ca.crt`` and ``ca.key``."""
    if (folder / "ca.key").exists():
        return
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        _builder(subject, subject, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    _write_public(folder / "ca.crt", certificate.public_bytes(Encoding.PEM))
    _write_private(folder / "ca.key", key)


def make_certificate(folder: Path, authority: Path, hosts: Sequence[str]) -> None:
    """Make ``tls.crt`` and ``tls.key`` for these hosts, with the ``ca.crt`` that signed them."""
    if (folder / "tls.key").exists():
        return
    issuer = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    issuer_key = load_pem_private_key((authority / "ca.key").read_bytes(), None)
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey):
        raise TypeError(f"{authority / 'ca.key'} is no elliptic-curve key")
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    both_ends = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(subject, issuer.subject, key, CERTIFICATE_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both_ends), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([_name(host) for host in dict.fromkeys(hosts)]),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .sign(issuer_key, hashes.SHA384())
    )
    _write_public(folder / "tls.crt", certificate.public_bytes(Encoding.PEM))
    _write_private(folder / "tls.key", key)
    if folder != authority:
        _copy(authority / "ca.crt", folder)


def make_node_key(private: Path, public: Path) -> None:
    """Make a SuperNode's key pair in OpenSSH's format."""
    if private.exists():
        return
    key = ec.generate_private_key(ec.SECP384R1())
    _write(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), 0o600)
    line = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write_public(public, line + f" {public.stem}\n".encode())


def _copy(source: Path, folder: Path) -> None:
    _write_public(folder / source.name, source.read_bytes())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    _write(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)


def _write_secret(path: Path, secret: str) -> None:
    if not path.exists():
        _write(path, secret.encode(), 0o600)


def _write_public(path: Path, content: bytes) -> None:
    _write(path, content, 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # With its mode from the start: a key that is readable for a moment has been read.
    path.unlink(missing_ok=True)
    path.touch(mode=mode)
    path.write_bytes(content)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--regions", nargs="+", required=True)
    parser.add_argument("--devices", type=int, default=2, help="node keys per region")
    parser.add_argument("--host", nargs="*", default=[], help="further names of the SuperLinks")
    given = parser.parse_args()
    try:
        make_deployment(given.folder, given.regions, given.devices, given.host)
    except ConfigurationError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
