"""`docker-compose.yml` as containers: it trains, loses a region and finds it again, keeps shut.

`make test-compose`. Needs a Docker engine from 26 on (for `subpath` of volumes).
`REGIONFED_IMAGE=name:tag` runs an image that was built from `deploy/Dockerfile`; without it, and
without any registry, the containers run this machine's own programs
(`tests/integration/host_image.py`) and its nginx.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from flwr.supercore.routers.runtime.router import create_runtime_router
from flwr.superlink.routers.control.router import router as control_router

from deploy.keys import make_node_key
from regionfed.privacy.ledger import read_ledger
from tests.integration import host_image

pytestmark = pytest.mark.compose

ROOT = host_image.ROOT
REGIONS = ("us", "uk")
SECONDS = 900.0  # until a test gives up; says nothing of how long it takes
SETTINGS: dict[str, Any] = {
    "run-name": "compose",
    "run-dir": "/runs",
    "regions": 2,
    "clients-per-region": 2,
    "examples-per-client": 80,
    "size-noise-multiplier": 2.0,
    "rounds": 5,
    "evaluate-every": 100,
    "rho-every": 0,
    "user-steps": 0,
    "sampling-rate": 0.5,
    "target-epsilon": 8.0,
    "microbatch": 8,
    "round-timeout": 120.0,
    "device-timeout": 60.0,
    "join-timeout": 600.0,
}


def engine_is_there() -> bool:
    """Say whether a Docker engine answers that can mount a part of a volume."""
    if shutil.which("docker") is None:
        return False
    asked = subprocess.run(
        ["docker", "version", "--format", "{{.Server.APIVersion}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    version = asked.stdout.strip()
    return asked.returncode == 0 and tuple(map(int, version.split("."))) >= (1, 45)


class Stack:
    """The project's Compose file, up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"regionfed-test-{os.getpid()}"
        self.log = folder / "submit.log"
        self.submitted: subprocess.Popen[bytes] | None = None
        settings = folder / "settings.toml"
        settings.write_text(
            "".join(f"{key} = {json.dumps(value)}\n" for key, value in SETTINGS.items())
        )
        settings.chmod(0o644)
        self.environment = os.environ | {"SETTINGS": str(settings), "PART_CPUS": "1"}
        self.files = [ROOT / "docker-compose.yml"]
        self._command = compose_command()

    def start(self) -> None:
        image = os.environ.get("REGIONFED_IMAGE", "")
        if not image:
            image = f"regionfed:{self.name}"
            options = [word for change in host_image.changes() for word in ("--change", change)]
            docker("import", *options, "-", image, given=host_image.archive())
            self.environment["PROXY_IMAGE"] = image
            services = json.loads(self.compose("--profile", "*", "config", "--format", "json"))
            extra = self.folder / "host.json"
            extra.write_text(json.dumps(host_image.override(services["services"])))
            self.files.append(extra)
        self.environment["REGIONFED_VERSION"] = image.rpartition(":")[2]
        self.compose("--progress", "quiet", "up", "--detach", "--no-build")

    def compose(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            [*self._compose, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout if check else f"{done.returncode} {done.stdout}{done.stderr}"

    @property
    def _compose(self) -> list[str]:
        files = [word for file in self.files for word in ("--file", str(file))]
        project = ["--project-name", self.name, "--project-directory", str(ROOT)]
        return [*self._command, *project, *files]

    def submit(self) -> None:
        """Start the world's run as a person does; it goes on by itself."""
        with self.log.open("wb") as output:
            self.submitted = subprocess.Popen(
                [*self._compose, "run", "--rm", "--no-TTY", "submit"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def container(self, service: str) -> str:
        return self.compose("ps", "--all", "--quiet", service).strip()

    def python(self, service: str, program: str, *arguments: str) -> Any:
        """Run a program within a container that is up; return what it printed, as JSON."""
        said = self.compose("exec", "--no-TTY", service, "python", "-c", program, *arguments)
        return json.loads(said)

    def rounds(self) -> list[dict[str, Any]]:
        """Return the world's rounds so far."""
        found: list[dict[str, Any]] = self.python("superexec-world", READ_ROUNDS)
        return found

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not done():
            if time.monotonic() > deadline:
                raise AssertionError(f"no {what}.\n{self.last_words()}")
            if self.submitted is not None and self.submitted.poll() not in {None, 0}:
                raise AssertionError(f"the run failed.\n{self.last_words()}")
            time.sleep(2.0)

    def last_words(self) -> str:
        submitted = self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""
        return (
            self.compose("ps", "--all", check=False)
            + self.compose("logs", "--no-color", "--tail", "15", check=False)
            + submitted
        )

    def end(self) -> None:
        if self.submitted is not None and self.submitted.poll() is None:
            self.submitted.kill()
        self.compose(
            *("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "3"),
            check=False,
        )


READ_ROUNDS = """
import json, pathlib
path = pathlib.Path("/runs/compose/metrics.jsonl")
lines = path.read_text().splitlines() if path.exists() else []
print("[" + ",".join(lines) + "]")
"""


def docker(*arguments: str, given: bytes = b"") -> str:
    done = subprocess.run(["docker", *arguments], input=given, capture_output=True, check=False)
    assert done.returncode == 0, (arguments, done.stderr.decode())
    return done.stdout.decode().strip()


def compose_command() -> list[str]:
    """Return Docker's own plugin, else the one that `make containers` installs."""
    plugin = ["docker", "compose"]
    if subprocess.run([*plugin, "version"], capture_output=True, check=False).returncode == 0:
        return plugin
    return [str(Path(sys.prefix) / "containers" / "bin" / "docker-compose")]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if not engine_is_there():
        pytest.skip("no Docker engine from 26 on answers here")
    if not (os.environ.get("REGIONFED_IMAGE") or shutil.which("nginx")):
        pytest.skip("neither REGIONFED_IMAGE nor a nginx of this machine's own to mount")
    started = Stack(tmp_path_factory.mktemp("compose"))
    try:
        started.start()
        yield started
    finally:
        started.end()


# ------------------------------------------------------------------------------------ training
def test_it_trains_and_a_region_that_is_cut_off_comes_back(stack: Stack) -> None:
    """Two rounds; then a region's cable is pulled, and put back: the run ends as it should."""
    stack.submit()
    stack.wait("round 2", lambda: len(stack.rounds()) >= 2)
    assert [sorted(row["answered"]) for row in stack.rounds()[:2]] == [["UK", "US"]] * 2

    network, uplink = f"{stack.name}_fleet-world", stack.container("uplink-uk")
    docker("network", "disconnect", network, uplink)
    stack.wait("a round without UK", lambda: stack.rounds()[-1]["answered"] == ["US"])
    docker("network", "connect", "--alias", "uplink-uk", network, uplink)

    assert stack.submitted is not None
    stack.wait("end", lambda: stack.submitted.poll() is not None)
    assert stack.submitted.returncode == 0, stack.last_words()
    summary = stack.python("superexec-world", READ_SUMMARY)
    assert summary["status"] == "finished" and summary["rounds"] == SETTINGS["rounds"]
    assert {failure["region"] for failure in summary["failures"]} == {"UK"}
    assert sorted(stack.rounds()[-1]["answered"]) == ["UK", "US"], stack.rounds()


def test_no_release_was_charged_twice(stack: Stack) -> None:
    """What was cut off is charged once, and no epsilon goes down."""
    for region in REGIONS:
        target = stack.folder / f"ledger-{region}.jsonl"
        stack.compose("cp", f"superexec-{region}:/region/compose/ledger.jsonl", str(target))
        events = [(event.round, event.release) for event in read_ledger(target)]
        assert len(set(events)) == len(events) and events


READ_SUMMARY = """
import pathlib
print(pathlib.Path("/runs/compose/summary.json").read_text())
"""


# ------------------------------------------------------------------------------------ security
PROBE = """
import json, socket, ssl, sys, urllib.error, urllib.request
found, asked = {}, json.loads(sys.argv[1])
for host, port in asked["hosts"]:
    try:
        socket.create_connection((host, port), timeout=3).close()
        found[f"{host}:{port}"] = "open"
    except OSError as error:
        found[f"{host}:{port}"] = "shut"
context = ssl.create_default_context(cafile="/keys/ca.crt")
for method, url in asked["urls"]:
    request = urllib.request.Request(url, method=method, data=b"" if method == "POST" else None)
    request.add_header("Content-Type", "application/protobuf")
    try:
        reply = urllib.request.urlopen(request, context=context, timeout=9)
        found[f"{method} {url}"] = reply.status
    except urllib.error.HTTPError as error:
        found[f"{method} {url}"] = error.code
print(json.dumps(found))
"""


def privileged_paths() -> list[str]:
    """Return each path of Flower's Control and Runtime APIs, as the installed Flower has them."""
    routes = [*control_router.routes, *create_runtime_router("SuperLink").routes]
    paths = sorted({route.path for route in routes if hasattr(route, "path")})
    assert len(paths) > 20
    return paths


def probe(
    stack: Stack,
    service: str,
    hosts: Sequence[tuple[str, int]],
    urls: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    found: dict[str, Any] = stack.python(service, PROBE, json.dumps({"hosts": hosts, "urls": urls}))
    return found


def test_a_device_gets_nothing_of_control_and_runtime(stack: Stack) -> None:
    """Each path, at the one address that it reaches: 404, and 403 for what is no POST."""
    proxy = "https://proxy-us:8443"
    crooked = ["/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "/health"]
    paths = [*privileged_paths(), *crooked, "/openapi.json", "/docs", "/"]
    urls = [("POST", proxy + path) for path in paths]
    found = probe(stack, "device-us-0", (), urls)
    assert set(found.values()) == {404}, found
    # The way for SuperNodes is there, and asks who they are.
    asked = probe(stack, "device-us-0", (), [("POST", f"{proxy}/v1/fleet/pull-messages")])
    assert set(asked.values()) <= {400, 401, 403, 422}, asked
    asked = probe(stack, "device-us-0", (), [("GET", f"{proxy}/v1/fleet/pull-messages")])
    assert set(asked.values()) == {403}, asked


def addresses(stack: Stack, service: str) -> list[str]:
    """Return every address of a container, whatever the names say."""
    networks = json.loads(docker("inspect", stack.container(service)))[0]["NetworkSettings"]
    return [network["IPAddress"] for network in networks["Networks"].values()]


def doors(stack: Stack, services: Sequence[str]) -> list[tuple[str, int]]:
    """Return these services by name and by address, at every port that anything listens on."""
    hosts = [host for name in services for host in (name, *addresses(stack, name))]
    return [(host, port) for host in hosts for port in (8000, 8443, 9094, 9095, 9999)]


def test_a_device_reaches_its_regions_proxy_alone(stack: Stack) -> None:
    others = [
        *("superlink-us", "superexec-us", "uplink-us", "proxy-uk", "superlink-uk", "device-uk-0"),
        *("proxy-world", "superlink-world", "superexec-world"),
    ]
    found = probe(stack, "device-us-0", doors(stack, others))
    assert set(found.values()) == {"shut"}, found
    assert probe(stack, "device-us-0", [("proxy-us", 8443)]) == {"proxy-us:8443": "open"}
    # Devices of a region share its network, and have nothing open on it.
    assert set(probe(stack, "device-us-0", doors(stack, ["device-us-1"])).values()) == {"shut"}


def test_an_uplink_reaches_the_worlds_proxy_and_its_bridge_alone(stack: Stack) -> None:
    others = ["superlink-us", "proxy-us", "device-us-0", "superlink-world", "superexec-world"]
    found = probe(stack, "uplink-us", doors(stack, [*others, "superexec-uk", "superlink-uk"]))
    assert set(found.values()) == {"shut"}, found
    found = probe(stack, "uplink-us", doors(stack, ["superexec-us"]))
    assert {door.rpartition(":")[2] for door, is_ in found.items() if is_ == "open"} <= {"9095"}
    found = probe(stack, "uplink-us", [("proxy-world", 8443)])
    assert found == {"proxy-world:8443": "open"}


def test_the_world_reaches_no_region(stack: Stack) -> None:
    parts = ["superlink-us", "superexec-us", "proxy-us", "device-us-0"]
    for service in ("superexec-world", "superlink-world"):
        found = probe(stack, service, doors(stack, parts))
        assert set(found.values()) == {"shut"}, found


@pytest.mark.parametrize("whose", ["a stranger's", "another region's"])
def test_a_key_that_is_not_enrolled_is_refused(whose: str, stack: Stack) -> None:
    keys = stack.folder / whose.partition("'")[0].replace(" ", "-")
    keys.mkdir()
    make_node_key(keys / "key", keys / "stranger.pub")
    if whose == "another region's":
        stack.compose("cp", "device-uk-0:/keys/key", str(keys / "key"))
    os.chown(keys / "key", host_image.USER, host_image.USER)
    keys.chmod(0o755)
    said = stack.compose(
        *("run", "--rm", "--no-TTY", "--no-deps", "--volume", f"{keys}:/stranger:ro"),
        *("device-us-0", "flower-supernode", "--superlink", "proxy-us:8443"),
        *("--root-certificates", "/keys/ca.crt"),
        *("--auth-supernode-private-key", "/stranger/key"),
        check=False,
    )
    status, _, words = said.partition(" ")
    assert int(status) not in {0, 125, 126, 127}, said
    assert "SuperNode ID" not in words and "ERROR" in words, said


def test_containers_may_do_little(stack: Stack) -> None:
    """As the engine has it, not as the file says."""
    running = stack.compose("ps", "--quiet").split()
    assert len(running) >= 16
    for found in json.loads(docker("inspect", *running)):
        host = found["HostConfig"]
        assert found["Config"]["User"] == f"{host_image.USER}:{host_image.USER}"
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["CapAdd"]
        assert host["SecurityOpt"] == ["no-new-privileges:true"] and not host["Privileged"]
        assert host["Memory"] > 0 and host["NanoCpus"] > 0 and host["PidsLimit"] > 0
        assert not host["PortBindings"]


def test_no_secret_is_in_a_log(stack: Stack) -> None:
    logs = stack.compose("logs", "--no-color")
    for service, path in (
        ("superexec-us", "/bridge/bridge.token"),
        ("superexec-us", "/keys/superexec.secret"),
        ("superlink-world", "/keys/superexec.secret"),
    ):
        target = stack.folder / "secret"
        stack.compose("cp", f"{service}:{path}", str(target))
        secret = target.read_text().strip()
        assert len(secret) == 64 and secret not in logs
    assert "PRIVATE KEY" not in logs
