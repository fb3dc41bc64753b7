"""The Compose file: who reaches whom, and what a container may do; nothing here starts one."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from deploy.compose import ALWAYS, PROFILE, REGIONS, compose
from deploy.keys import WORLD, make_deployment, service_name
from region_app.bridge.endpoint import Endpoint
from region_app.site import Site

ROOT = Path(__file__).resolve().parents[2]
FILE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
NAMES = [service_name(region) for region in REGIONS]
LINKS = [WORLD, *NAMES]
DEVICES = 2
ONE_SHOT = {"keys", "submit", *(f"enrol-{n}" for n in LINKS), *(f"coordinator-{n}" for n in NAMES)}


def networks(service: str) -> set[str]:
    """Return the networks that a service is on."""
    return set(SERVICES[service].get("networks", ()))


def neighbours(service: str) -> set[str]:
    """Return the services that share a network with one."""
    return {other for other in SERVICES if networks(other) & networks(service)} - {service}


def test_the_file_is_what_the_generator_writes() -> None:
    written = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    assert written == compose(REGIONS, DEVICES)


def test_every_part_is_there() -> None:
    parts = {"keys", "submit"}
    parts |= {f"{part}-{n}" for n in LINKS for part in ("superlink", "superexec", "proxy", "enrol")}
    parts |= {f"{part}-{n}" for n in NAMES for part in ("coordinator", "uplink")}
    parts |= {f"device-{n}-{i}" for n in NAMES for i in range(DEVICES)}
    assert set(SERVICES) == parts


def test_two_regions_start_and_eight_by_a_profile() -> None:
    for name, service in SERVICES.items():
        belongs = [n for n in NAMES if n in name.split("-")]
        if name == "submit":
            assert service["profiles"] == ["submit"]
        elif belongs and NAMES.index(belongs[0]) >= ALWAYS:
            assert service["profiles"] == [PROFILE], name
        else:
            assert "profiles" not in service, name


# -------------------------------------------------------------------------------- networks
def test_no_network_leads_out_and_no_port_is_open() -> None:
    assert all(network == {"internal": True} for network in FILE["networks"].values())
    for name, service in SERVICES.items():
        assert "ports" not in service, name
        assert service.get("network_mode", "none") == "none", name
        assert networks(name) or name == "keys", name


@pytest.mark.parametrize("name", NAMES)
def test_a_device_reaches_the_proxy_of_its_region_alone(name: str) -> None:
    """Neither the SuperLink itself, whose port has the Control API, nor anything of another."""
    for index in range(DEVICES):
        found = neighbours(f"device-{name}-{index}")
        assert found == {f"proxy-{name}"} | {
            f"device-{name}-{i}" for i in range(DEVICES) if i != index
        }


@pytest.mark.parametrize("name", NAMES)
def test_an_uplink_reaches_the_bridge_and_the_worlds_proxy(name: str) -> None:
    assert networks(f"uplink-{name}") == {f"fleet-{WORLD}", f"bridge-{name}"}
    of_region = {other for other in neighbours(f"uplink-{name}") if name in other.split("-")}
    assert of_region == {f"superexec-{name}"}


def test_the_world_reaches_nothing_of_a_region_but_uplinks() -> None:
    for part in ("superlink", "superexec", "proxy", "enrol"):
        for other in neighbours(f"{part}-{WORLD}"):
            assert other.endswith(f"-{WORLD}") or other == "submit" or other.startswith("uplink-")


def test_regions_do_not_reach_each_other() -> None:
    for network in FILE["networks"]:
        regions = {
            n for s in SERVICES if network in networks(s) for n in NAMES if n in s.split("-")
        }
        assert len(regions) <= 1 or network == f"fleet-{WORLD}", network


def test_a_superlink_is_reached_by_its_own_alone() -> None:
    """All of whom are trusted with its Control API."""
    for name in LINKS:
        allowed = {f"{part}-{name}" for part in ("superexec", "proxy", "enrol", "coordinator")}
        assert neighbours(f"superlink-{name}") <= allowed | ({"submit"} if name == WORLD else set())


# ------------------------------------------------------------------------------- hardening
@pytest.mark.parametrize("name", SERVICES)
def test_a_container_may_do_little(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"] and "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.get("privileged") and "pid" not in service and "devices" not in service
    assert {"pids_limit", "mem_limit", "cpus"} <= set(service)
    for mount in service.get("volumes", ()):
        assert mount["type"] == "volume" or mount["read_only"], mount
        assert "docker.sock" not in mount["source"]


@pytest.mark.parametrize("name", sorted(set(SERVICES) - ONE_SHOT))
def test_what_runs_on_is_watched_and_started_again(name: str) -> None:
    """F5, F6: a killed node cannot rejoin for a minute, so that it must go on trying."""
    assert SERVICES[name]["restart"] == "always"
    assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"


def test_images_are_pinned() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    base = re.search(r"^ARG BASE=python:(\S+)$", dockerfile, re.MULTILINE)
    assert base and re.match(r"3\.\d+\.\d+-slim-\w+$", base[1])
    assert all(
        line == "FROM ${BASE}" or line == "FROM ${BASE} AS build"
        for line in dockerfile.splitlines()
        if line.startswith("FROM")
    )
    assert "\nUSER 10001:10001\n" in dockerfile
    images = {service["image"] for service in SERVICES.values()}
    assert len(images) == 2 and not any(image.endswith("latest}") for image in images)
    assert all(re.search(r":-.*\d+\.\d+\.\d+", image) for image in images)


def test_f2_nothing_is_installed_or_told_at_run_time() -> None:
    """F2.

    A run may `uv sync` the app's dependencies and shadow the installed package; offline it fails.
    -> switched off in our compose file, as are telemetry and the check for updates.
    """
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    for switch in (
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1",
        "FLWR_TELEMETRY_ENABLED=0",
        "FLWR_DISABLE_UPDATE_CHECK=1",
        "HF_HUB_OFFLINE=1",
    ):
        assert switch in dockerfile
    for name in LINKS:
        assert (
            "--disable-runtime-dependency-installation" in SERVICES[f"superlink-{name}"]["command"]
        )
    assert not any(
        "--allow-runtime-dependency-installation" in service.get("command", ())
        for service in SERVICES.values()
    )


@pytest.mark.parametrize("name", LINKS)
def test_a_superlink_asks_who_is_there(name: str) -> None:
    command = SERVICES[f"superlink-{name}"]["command"]
    assert {"--enable-supernode-auth", "--database", "--ssl-certfile"} <= set(command)
    assert command[command.index("--isolation") + 1] == "process"
    assert "--superexec-auth-secret-file" in command and "--insecure" not in command
    assert "--superexec-auth-secret-file" in SERVICES[f"superexec-{name}"]["command"]


def test_the_proxy_passes_fleet_calls_alone() -> None:
    """Read, not run: every location but one is a refusal."""
    conf = (ROOT / "deploy" / "proxy.conf").read_text(encoding="utf-8")
    locations = re.findall(r"location (.+?) \{\s*(.*?)[;{]", conf, re.DOTALL)
    passing = [where for where, first in locations if not first.startswith("return")]
    assert passing == ['~ "^/v1/fleet/[a-z-]+$"']
    pattern = re.compile(passing[0].split('"')[1])
    assert pattern.search("/v1/fleet/pull-messages")
    for path in (
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/v1/fleet/../control/stop-run",
        "/docs",
        "/openapi.json",
        "/v1/fleet/",
        "/V1/fleet/x",
        "/v1/fleetx/a",
    ):
        assert not pattern.search(path), path


# ------------------------------------------------------------------------------------ keys
@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command that the one-shot service runs."""
    folder = tmp_path_factory.mktemp("keys")
    command = [sys.executable, "-m", "deploy.keys", str(folder), "--regions", "US", "Île de France"]
    subprocess.run([*command, "--devices", "2"], cwd=ROOT, check=True)
    return folder


@pytest.mark.parametrize("module", ["deploy.keys", "deploy.compose"])
@pytest.mark.parametrize(
    ("regions", "said"),
    [
        (["US", "a-b c", "a b-c"], "region 'a-b c' and region 'a b-c' would both be 'a-b-c'"),
        (["Île", "ile"], "region 'Île' and region 'ile' would both be 'ile'"),
        (["US", "World"], "the world and region 'World' would both be 'world'"),
    ],
)
def test_two_regions_of_one_host_name_are_refused(
    module: str, regions: list[str], said: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """They would share hosts, volumes and keys; nothing is written."""
    where = [str(tmp_path)] if module == "deploy.keys" else []
    monkeypatch.setattr(sys, "argv", [module, *where, "--regions", *regions])
    with pytest.raises(SystemExit):
        import_module(module).main()
    printed = capsys.readouterr()
    assert said in printed.err and not printed.out
    assert not list(tmp_path.iterdir())


def private_files(folder: Path) -> Iterator[Path]:
    for pattern in ("**/*.key", "**/key", "**/*.secret", "**/*.token"):
        yield from folder.glob(pattern)


def test_certificates_name_their_hosts_and_have_an_authority_each(keys: Path) -> None:
    authorities = {}
    for link, name in (
        (WORLD, WORLD),
        ("US", "us"),
        ("Île de France", service_name("Île de France")),
    ):
        authority = x509.load_pem_x509_certificate((keys / link / "authority/ca.crt").read_bytes())
        authorities[link] = authority.fingerprint(authority.signature_hash_algorithm)  # type: ignore[arg-type]
        for party in ("superlink", "proxy"):
            certificate = x509.load_pem_x509_certificate(
                (keys / link / party / "tls.crt").read_bytes()
            )
            certificate.verify_directly_issued_by(authority)
            names = certificate.extensions.get_extension_for_class(
                x509.SubjectAlternativeName
            ).value
            # By the plain name the proxy finds the SuperLink of its own network.
            assert {f"{party}-{name}", party} <= set(names.get_values_for_type(x509.DNSName))
            assert "localhost" in names.get_values_for_type(x509.DNSName)
            assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert len(set(authorities.values())) == 3


def test_node_keys_are_what_flower_wants(keys: Path) -> None:
    for node, link in (("US", WORLD), ("device-0", "US"), ("device-1", "US")):
        private = load_ssh_private_key((keys / link / "nodes" / node / "key").read_bytes(), None)
        public = load_ssh_public_key((keys / link / "operator" / f"{node}.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert private.curve.name == "secp384r1" and private.public_key() == public


def test_secrets_are_readable_by_their_owner_alone_and_differ(keys: Path) -> None:
    found = list(private_files(keys))
    assert len(found) > 20
    assert {oct(path.stat().st_mode & 0o777) for path in found} == {"0o600"}
    secrets = [p.read_text() for p in found if p.suffix == ".secret"]
    assert len(set(secrets)) == 3 and min(map(len, secrets)) == 64


def test_both_ends_of_a_bridge_share_a_token_that_no_other_has(keys: Path) -> None:
    tokens = {}
    for region in ("US", "Île de France"):
        ends = {
            Endpoint("127.0.0.1:1", keys / region / end / "bridge.token").secret()
            for end in ("coordinator", "uplink")
        }
        (tokens[region],) = ends
    assert len(set(tokens.values())) == 2


def test_what_exists_is_kept(keys: Path) -> None:
    """Another start must not shut out everybody who is enrolled; a new device gets a key."""
    before = {path: path.read_bytes() for path in private_files(keys)}
    make_deployment(keys, ["US", "Île de France"], 3)
    assert {path: path.read_bytes() for path in before} == before
    assert (keys / "US" / "nodes" / "device-2" / "key").exists()


def test_each_service_gets_its_own_folder_of_the_keys(tmp_path: Path) -> None:
    """And every folder that is mounted is one that the keys are made in."""
    make_deployment(tmp_path, REGIONS, DEVICES)
    for name, service in SERVICES.items():
        mounts = [m for m in service.get("volumes", ()) if m["source"] == "keys"]
        for mount in mounts:
            if name == "keys":
                continue
            folder = mount["volume"]["subpath"]
            assert mount["read_only"] and (tmp_path / folder).is_dir(), name
            assert "authority" not in folder
    holders: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        for mount in service.get("volumes", ()):
            if mount["source"] == "keys" and name != "keys":
                holders.setdefault(mount["volume"]["subpath"], set()).add(name)
    for folder, names in holders.items():
        if "/nodes/" in folder or folder.endswith("/uplink"):
            assert len(names) == 1, (folder, names)


@pytest.mark.parametrize("region", REGIONS)
def test_a_coordinator_finds_its_site_file(region: str, tmp_path: Path) -> None:
    """It is what `Site` reads, and its address is the one that the uplink is given."""
    name = service_name(region)
    make_deployment(tmp_path, [region], 1)
    path = tmp_path / region / "coordinator" / "site.toml"
    site = Site.load({"REGIONFED_REGION": str(path)})
    assert site.region == region and site.bridge.tls == Path("/bridge")
    command = SERVICES[f"uplink-{name}"]["command"]
    port = site.bridge.address.rpartition(":")[2]
    assert f'bridge="coordinator-{name}:{port}"' in command[command.index("--node-config") + 1]
    aliases = SERVICES[f"superexec-{name}"]["networks"][f"bridge-{name}"]["aliases"]
    assert aliases == [f"coordinator-{name}"]


def test_the_gpu_file_names_services_that_exist() -> None:
    gpu = yaml.safe_load((ROOT / "deploy" / "gpu.yml").read_text(encoding="utf-8"))
    assert set(gpu["services"]) <= set(SERVICES)
