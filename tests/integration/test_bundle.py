"""Field cases F2 and F3: the app bundle that `flwr run` makes, and what runs from it.

The bundle is thin: it names the installed packages and holds none of them, since a bundle takes no
weights, no page template of a foreign type, and 10 MiB at most.
"""

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from flwr.cli.build import build_fab_from_files
from flwr.cli.config_utils import load_and_validate
from flwr.cli.install import install_from_fab
from flwr.common.constant import FAB_MAX_SIZE

from client_app.models import SHIPPED
from scripts import run as script

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
APP = PROJECT["tool"]["flwr"]["app"]
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def files_below(folder: Path) -> dict[str, bytes | Path]:
    """What Flower looks at when it builds a bundle, less the environment's 50,000 files."""
    top = [
        path for path in folder.iterdir() if not path.name.startswith(".") and path.name != "runs"
    ]
    found = [path for entry in top for path in (entry, *entry.rglob("*")) if path.is_file()]
    found += [path for path in (folder / ".gitignore",) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path for path in found}


@pytest.fixture(scope="module")
def fab() -> bytes:
    return build_fab_from_files(files_below(ROOT))[0]


@pytest.fixture(scope="module")
def unpacked(fab: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle as Flower installs it before a run."""
    return install_from_fab(fab, tmp_path_factory.mktemp("apps"), skip_prompt=True)


@pytest.fixture(scope="module")
def seen(unpacked: Path) -> dict[str, Any]:
    """What a process sees that loads the components as Flower does, from the unpacked bundle."""
    try:
        importlib.metadata.distribution("regionfed")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("RegionFed is not installed in this environment: make venv")
    found: dict[str, Any] = json.loads(
        python(PROBE, json.dumps(APP["components"]), folder=unpacked)
    )
    return found


PROBE = """
import json, sys
from importlib import resources
from pathlib import Path
from flwr.supercore.object_ref import load_app

components = json.loads(sys.argv[1])
facts = {
    "kinds": {
        name: type(load_app(reference, ImportError, Path.cwd())).__name__
        for name, reference in components.items()
    }
}
from client_app.models import model_folder
from server_app.report.template import PAGE

facts["homes"] = {n: sys.modules[ref.partition(":")[0]].__file__ for n, ref in components.items()}
facts["model"] = str(model_folder("retail-t5"))
facts["page"] = len(PAGE)
facts["typed"] = resources.files("regionfed").joinpath("py.typed").is_file()
facts["first_path"] = sys.path[0]
print(json.dumps(facts))
"""


def python(program: str, *arguments: str, folder: Path, **environment: str) -> str:
    """Run a program in a process that knows nothing of the source tree; return its last line."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env={**clean, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


# ------------------------------------------------------------------------------ what is in it
def test_f3_it_is_far_below_the_limit(fab: bytes) -> None:
    assert len(fab) < FAB_MAX_SIZE / 100


def test_f3_it_holds_a_description_and_no_code(fab: bytes) -> None:
    names = set(zipfile.ZipFile(BytesIO(fab)).namelist())
    assert names == {"pyproject.toml", "README.md", ".info/CONTENT"}


def test_it_is_the_same_each_time(fab: bytes) -> None:
    assert build_fab_from_files(files_below(ROOT))[0] == fab


def test_make_run_submits_the_same_bundle(fab: bytes, tmp_path: Path) -> None:
    folder = script.descriptor(tmp_path)
    assert folder != ROOT, "make run walks the whole tree, virtual environment and all"
    assert build_fab_from_files(files_below(folder))[0] == fab


def test_flower_accepts_it(unpacked: Path) -> None:
    config, _ = load_and_validate(unpacked / "pyproject.toml", check_module=False)
    assert config["project"]["name"] == "regionfed"


# ------------------------------------------------------------------------- what runs from it
def test_the_components_resolve(seen: dict[str, Any]) -> None:
    assert seen["kinds"] == {"serverapp": "ServerApp", "clientapp": "ClientApp"}


def test_they_are_the_installed_ones(seen: dict[str, Any], unpacked: Path) -> None:
    assert seen["first_path"] == str(unpacked)
    for home in seen["homes"].values():
        assert not Path(home).is_relative_to(unpacked)


def test_f3_the_shipped_model_is_found(seen: dict[str, Any]) -> None:
    assert SHIPPED == "retail-t5"
    folder = Path(seen["model"])
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").stat().st_size > 100_000


def test_f3_the_report_s_template_and_the_types_are_found(seen: dict[str, Any]) -> None:
    assert seen["page"] > 1000
    assert seen["typed"]


# --------------------------------------------------------------- F2: nothing is installed twice
INSTALL = """
import sys
from pathlib import Path
from flwr.supercore.superexec.dependency_installer import install_app_dependencies

runtime = install_app_dependencies(Path.cwd(), launch_id="test")
places = [p for lib in ("lib", "Lib") for p in (runtime / lib).rglob("site-packages")]
print(sorted(p.name for place in places for p in place.iterdir() if p.suffix == ".dist-info"))
"""


def test_f2_flower_s_installer_needs_no_network_and_installs_nothing(
    unpacked: Path, tmp_path: Path
) -> None:
    """Flower calls `uv sync` before a run: it would fetch PyTorch again, or fail offline."""
    installed = python(
        INSTALL,
        folder=unpacked,
        FLWR_HOME=str(tmp_path / "flwr"),
        UV_CACHE_DIR=str(tmp_path / "cache"),
        UV_OFFLINE="1",
    )
    assert installed == "[]"


def test_f2_the_entry_that_tells_uv_so_is_for_this_version() -> None:
    (entry,) = PROJECT["tool"]["uv"]["dependency-metadata"]
    project = PROJECT["project"]
    assert (entry["name"], entry["version"]) == (project["name"], project["version"])
    assert entry["requires-dist"] == []


def test_f2_who_installs_the_source_with_uv_gets_the_dependencies(fab: bytes) -> None:
    # uv passes over [tool.uv] beside a uv.toml, so one is in the source and none in the bundle.
    assert (ROOT / "uv.toml").is_file()
    assert "uv.toml" not in zipfile.ZipFile(BytesIO(fab)).namelist()


# ------------------------------------------------------------------------------- all together
MARK = "REGIONFED_TEST_RUN"


def marked(text: str) -> list[str]:
    """Return the processes that have some text in their environment, where a system tells."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if text.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " "))
    return found


def test_make_run_runs_offline_and_leaves_nothing_behind(
    seen: dict[str, Any], t5_folder: Path, tmp_path: Path
) -> None:
    settings = {
        "model": str(t5_folder),
        "run-dir": str(tmp_path),
        **{"rounds": 1, "regions": 2, "clients-per-region": 2, "examples-per-client": 24},
        **{"evaluate-every": 1, "sampling-rate": 0.5, "target-epsilon": 8.0},
    }
    run_config = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "run.py"), run_config],
        cwd=tmp_path,
        env={**os.environ, "UV_OFFLINE": "1", MARK: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == script.FINISHED, done.stdout + done.stderr
    (summary,) = tmp_path.glob("2*/summary.json")
    assert json.loads(summary.read_text(encoding="utf-8"))["status"] == "finished"
    assert str(summary) in done.stdout
    assert not marked(f"{MARK}={tmp_path}")


def test_a_run_that_fails_exits_as_failed(seen: dict[str, Any], tmp_path: Path) -> None:
    """F6: a clear exit status; `flwr run` itself exits with 0."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "run.py"), f'run-dir="{tmp_path}" rounds=0'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == script.FAILED, done.stdout + done.stderr
    assert "rounds=0" in done.stdout


# ----------------------------------------------------------- the installed package is complete
def imported(package: Path) -> dict[str, Path]:
    """Top-level names that a package imports, each with a file that does."""
    found: dict[str, Path] = {}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found.update({alias.name.partition(".")[0]: path for alias in node.names})
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found[node.module.partition(".")[0]] = path
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_is_a_declared_dependency(package: str) -> None:
    project = PROJECT["project"]
    extras = [r for n, some in project["optional-dependencies"].items() if n != "dev" for r in some]
    requirements = [*project["dependencies"], *extras]
    declared = {name_of(requirement) for requirement in requirements}
    distributions = importlib.metadata.packages_distributions()
    for name, path in imported(ROOT / package).items():
        if name in sys.stdlib_module_names or name in PACKAGES:
            continue
        owners = {name_of(owner) for owner in distributions.get(name, [])}
        if not owners and name in project["optional-dependencies"]:
            continue  # not installed for tests; such an extra bears the name of what is imported
        assert owners & declared, f"{path} imports {name}, of {owners or 'nobody'}: declare it"


def name_of(requirement: str) -> str:
    """Return the normalised name of a distribution: what comes before extras and bounds."""
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), None)
    return requirement[:end].lower().replace("_", "-").replace(".", "-")
