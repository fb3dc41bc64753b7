"""A whole deployment on this machine: one process for each part, TLS, and node keys.

    python -m scripts.loopback ["rounds=2 regions=2 clients-per-region=2"]

Starts the world's SuperLink, a SuperLink per region, their SuperExecs, an uplink and the devices of
each region, submits the coordinators' runs and the world's, shows the world's log, and ends
everything. Each process has a `FLWR_HOME` of its own, as on machines of their own. The tests break
its parts on purpose.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from deploy.keys import WORLD, make_deployment
from region_app.bridge.client import is_healthy
from region_app.bridge.endpoint import Endpoint
from region_app.site import FILE as SITE_FILE

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
BUNDLES = ROOT / "deploy"  # has the apps `world` and `region`

START_SECONDS = 600.0  # until a part answers
END_SECONDS = 5.0  # until a part that is asked to end has ended
AGAIN_SECONDS = 10.0  # between two starts of a part that comes back

Settings = Mapping[str, bool | int | float | str]


@dataclass
class Part:
    """One process of the deployment, and those below it; it can be killed and started again.

    Attributes
    ----------
    home : Path
        Its `FLWR_HOME`; its log is ``log.txt`` there.
    comes_back : bool
        Whether it is started again when it has died, as a supervisor does. A SuperNode that was
        killed needs one: its SuperLink takes it for online, and refuses it, for a minute.
    """

    name: str
    command: list[str]
    home: Path
    environment: dict[str, str]
    process: "subprocess.Popen[bytes] | None" = None
    killed: bool = False
    comes_back: bool = False
    started: float = 0.0

    def start(self) -> None:
        """Start it, in a session of its own: a signal to the group reaches all below it."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.killed = False
        self.started = time.monotonic()
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.home,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> Path:
        """What it has said."""
        return self.home / "log.txt"

    def signal(self, number: int) -> None:
        """Send a signal to it and to all below it."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def processes(self) -> list[int]:
        """Return the numbers of its processes now (Linux)."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                group = int((folder / "stat").read_text().rpartition(")")[2].split()[2])
                if self.process is not None and group == self.process.pid:
                    found.append(int(folder.name))
        return found

    def kill(self) -> None:
        """End it at once, as a power failure does."""
        self.killed = True
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def has_died(self) -> bool:
        """Say whether it has ended without being killed here."""
        return self.process is not None and self.process.poll() is not None and not self.killed

    def end(self) -> None:
        """End it, gently at first."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        self.kill()


@dataclass
class Link:
    """A SuperLink: where it is, and what it keeps."""

    name: str
    port: int
    keys: Path
    home: Path


class Deployment:
    """A world on this machine.

    Parameters
    ----------
    folder : Path
        Everything is kept below it.
    regions : sequence of str
    devices : int
        Per region.
    environment : mapping
        Added to that of every process.
    seeded_noise : bool
        Whether its regions let runs in whose noise is seeded, for a test.
    """

    def __init__(
        self,
        folder: Path,
        regions: Sequence[str],
        devices: int,
        environment: Mapping[str, str] | None = None,
        *,
        seeded_noise: bool = False,
    ) -> None:
        self.folder = folder
        self._seeded_noise = seeded_noise
        self.regions = tuple(regions)
        self.devices = devices
        self.parts: dict[str, Part] = {}
        self._environment = dict(environment or {})
        self._links = {
            name: Link(name, free_port(), folder / "keys" / name, self.home(f"superlink-{name}"))
            for name in (WORLD, *regions)
        }
        self._bridges = {region: free_port() for region in regions}
        make_deployment(folder / "keys", regions, devices)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process, nodes first."""
        for part in reversed(self.parts.values()):
            part.end()

    # ---------------------------------------------------------------------------- starting
    def _start(self) -> None:
        for link in self._links.values():
            self.add(self.superlink(link))
        for link in self._links.values():
            self.wait(f"{link.name}'s SuperLink", partial(_is_open, link.port))
            self.add(self.superexec(link))
        devices = [(region, i) for region in self.regions for i in range(self.devices)]
        nodes = [(WORLD, region) for region in self.regions]
        nodes += [(region, f"device-{index}") for region, index in devices]
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.register, *zip(*nodes, strict=True)))
        for region in self.regions:
            self.add(self.uplink(region))
        for region, index in devices:
            self.add(self.device(region, index))

    def add(self, part: Part) -> Part:
        """Start a part and remember it."""
        self.parts[part.name] = part
        part.start()
        return part

    def superlink(self, link: Link) -> Part:
        """Return a SuperLink; what it knows outlives it."""
        keys = link.keys / "superlink"
        return self._part(
            f"superlink-{link.name}",
            "flower-superlink",
            *("--host", "127.0.0.1", "--port", str(link.port)),
            *("--ssl-certfile", keys / "tls.crt", "--ssl-keyfile", keys / "tls.key"),
            *("--ssl-ca-certfile", keys / "ca.crt", "--enable-supernode-auth"),
            *("--database", link.home / "state.db", "--isolation", "process"),
            *("--superexec-auth-secret-file", keys / "superexec.secret"),
            "--disable-runtime-dependency-installation",
        )

    def superexec(self, link: Link) -> Part:
        """Return what runs a SuperLink's ServerApps; a region's knows where the region is."""
        keys = link.keys / "superlink"
        site = {SITE_FILE: str(self.site_file(link.name))} if link.name != WORLD else {}
        return self._part(
            f"superexec-{link.name}",
            "flower-superexec",
            *("--runtime-api-address", f"127.0.0.1:{link.port}"),
            *("--root-certificates", keys / "ca.crt"),
            *("--superexec-auth-secret-file", keys / "superexec.secret"),
            **site,
        )

    def uplink(self, region: str) -> Part:
        """Return a region's SuperNode on the world's SuperLink."""
        bridge = self.bridge(region)
        config = f'bridge="{bridge.address}" bridge-token="{bridge.token}"'
        return self._supernode(f"uplink-{region}", WORLD, region, config)

    def device(self, region: str, index: int) -> Part:
        """Return a device's SuperNode on its region's SuperLink."""
        name = f"device-{region}-{index}"
        folder = self.folder / "devices" / region / str(index)
        config = f'region="{region}" partition-id={index} state-folder="{folder}"'
        return self._supernode(name, region, f"device-{index}", config)

    def _supernode(self, name: str, link: str, key: str, config: str) -> Part:
        keys = self._links[link].keys / "nodes" / key
        part = self._part(
            name,
            "flower-supernode",
            *("--superlink", f"127.0.0.1:{self._links[link].port}"),
            *("--root-certificates", keys / "ca.crt"),
            *("--auth-supernode-private-key", keys / "key"),
            *("--port", str(free_port()), "--node-config", config),
        )
        part.comes_back = True
        return part

    def _part(self, name: str, command: str, *arguments: str | Path, **more: str) -> Part:
        home = self.home(name)
        environment = {**self.environment(home), **more}
        return Part(name, [str(BIN / command), *map(str, arguments)], home, environment)

    def home(self, name: str) -> Path:
        """Return the Flower home of a process."""
        return self.folder / "homes" / name

    def environment(self, home: Path) -> dict[str, str]:
        """Return the environment of a process whose Flower home this is."""
        ours = {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",  # several devices share this machine's cores
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))
            ),
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        return {**os.environ, **ours, **self._environment}

    # ----------------------------------------------------------------------------- regions
    def bridge(self, region: str) -> Endpoint:
        """Return where a region's bridge is."""
        token = self._links[region].keys / "uplink" / "bridge.token"
        return Endpoint(f"127.0.0.1:{self._bridges[region]}", token)

    def region_folder(self, region: str) -> Path:
        """Return the region's own disk."""
        return self.folder / "regions" / region

    def site_file(self, region: str) -> Path:
        """Write the file that tells a coordinator which region it is of."""
        bridge = self.bridge(region)
        path = self.folder / "sites" / f"{region}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"region = {json.dumps(region)}\n"
            f"folder = {json.dumps(str(self.region_folder(region)))}\n"
            f"seeded-noise = {json.dumps(self._seeded_noise)}\n"
            f"[bridge]\n"
            f"address = {json.dumps(bridge.address)}\n"
            f"token = {json.dumps(str(bridge.token))}\n"
        )
        return path

    # ------------------------------------------------------------------------------ Flower
    def flwr(self, link: str, *arguments: str | Path) -> str:
        """Run a command of Flower's against a SuperLink; return what it said."""
        home = self.home(f"operator-{link}")
        home.mkdir(parents=True, exist_ok=True)
        authority = self._links[link].keys / "operator" / "ca.crt"
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "it"\n\n[superlink.it]\n'
            f'address = "127.0.0.1:{self._links[link].port}"\n'
            f"root-certificates = {json.dumps(str(authority))}\n"
        )
        done = subprocess.run(
            [str(BIN / "flwr"), *map(str, arguments)],
            cwd=ROOT,
            env=self.environment(home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(map(str, arguments))}: {done.stdout}{done.stderr}")
        return done.stdout

    def register(self, link: str, node: str) -> None:
        """Enrol a node's key with a SuperLink."""
        key = self._links[link].keys / "operator" / f"{node}.pub"
        self.flwr(link, "supernode", "register", key, "it", "--name", node)

    def submit(self, link: str, settings: Settings, bundles: Path = BUNDLES) -> int:
        """Submit the run of a SuperLink, the world's or a region's; return its number."""
        app = bundles / (WORLD if link == WORLD else "region")
        config = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        said = self.flwr(link, "run", app, "it", "--run-config", config, "--format", "json")
        found = _json(said)
        if not found.get("success"):
            raise RuntimeError(said)
        return int(found["run-id"])

    def submit_regions(self, settings: Settings, bundles: Path = BUNDLES) -> dict[str, int]:
        """Submit every coordinator's run, and wait until their bridges answer."""
        with ThreadPoolExecutor() as pool:
            numbers = pool.map(lambda region: self.submit(region, settings, bundles), self.regions)
            runs = dict(zip(self.regions, numbers, strict=True))
        for region in self.regions:
            self.await_bridge(region)
        return runs

    def await_bridge(self, region: str) -> None:
        """Wait until a coordinator serves."""
        self.wait(f"the coordinator of {region}", lambda: is_healthy(self.bridge(region), 1.0))

    def status(self, link: str, run: int) -> tuple[str, str]:
        """Return a run's status, and what Flower says of it; empty where nobody answers."""
        try:
            found = _json(self.flwr(link, "ls", "it", "--run-id", str(run), "--format", "json"))
            return found["runs"][0]["status"], str(found["runs"][0].get("status-details", ""))
        except (RuntimeError, ValueError, KeyError):  # its SuperLink is being started again
            return "", ""

    def await_end(self, link: str, run: int, seconds: float) -> tuple[str, str]:
        """Wait until a run has ended; return its status and what Flower says of it."""
        self.wait(
            f"the end of {link}'s run",
            lambda: self.status(link, run)[0].startswith("finished"),
            seconds,
            pause=10.0,  # each look starts Flower's command
        )
        return self.status(link, run)

    def serverapp(self, link: str) -> int:
        """Return the process in which a SuperLink's run lives.

        Raises
        ------
        RuntimeError
            If there is none.
        """
        return serverapp_below(self.parts[f"superexec-{link}"])

    def wait(
        self,
        what: str,
        done: Callable[[], bool],
        seconds: float = START_SECONDS,
        pause: float = 0.2,
    ) -> None:
        """Wait until something is so.

        Raises
        ------
        TimeoutError
            Saying what was waited for, and the last words of every part.
        """
        deadline = time.monotonic() + seconds
        while not done():
            dead = [name for name, part in self.parts.items() if not self._is_kept(part)]
            if dead or time.monotonic() >= deadline:
                raise TimeoutError(f"no {what} after {seconds:g} s.\n{self.last_words()}")
            time.sleep(pause)

    @staticmethod
    def _is_kept(part: Part) -> bool:
        """Start a part again that comes back, now or soon; say whether all is well with it."""
        if part.has_died() and part.comes_back and time.monotonic() > part.started + AGAIN_SECONDS:
            part.start()
        return part.comes_back or not part.has_died()

    def last_words(self, lines: int = 12) -> str:
        """Return the end of each part's log."""
        return "\n".join(
            f"--- {part.name}\n"
            + "\n".join(part.log.read_text(errors="replace").splitlines()[-lines:])
            for part in self.parts.values()
            if part.log.exists()
        )


def free_port() -> int:
    """Return a port that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def serverapp_below(part: Part) -> int:
    """Return the ServerApp process below a SuperExec."""
    for pid in part.processes():
        with suppress(OSError):
            if b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    raise RuntimeError(f"no ServerApp runs below {part.name}")


def _is_open(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def _json(said: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said[said.index("{") :])
    return found


def main() -> int:
    """Deploy, run once, end; return the exit status."""
    settings: dict[str, Any] = {"regions": 2, "clients-per-region": 2, "rounds": 2}
    for text in sys.argv[1:]:
        settings |= tomllib.loads("\n".join(text.split()))
    from client_app.datasets.load import dataset_of  # noqa: PLC0415 (PyTorch: only when it is needed)
    from regionfed.config import Config  # noqa: PLC0415

    with TemporaryDirectory(prefix="regionfed-loopback-", ignore_cleanup_errors=True) as home:
        settings = {"run-name": "loopback", "run-dir": str(ROOT / "runs"), **settings}
        config = Config.from_run_config(settings)
        regions = dataset_of(config).regions
        with Deployment(Path(home), regions, config.clients_per_region) as deployment:
            deployment.submit_regions(settings)
            run = deployment.submit(WORLD, settings)
            status, why = deployment.await_end(WORLD, run, 86_400.0)
            sys.stdout.write(deployment.flwr(WORLD, "log", str(run), "it", "--show"))
    sys.stdout.write(f"{status} {why}\n")
    return 0 if status == "finished:completed" else 1


if __name__ == "__main__":
    sys.exit(main())
