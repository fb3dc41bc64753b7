"""An image without a registry: empty folders and links, over this machine's own programs.

Where no image can be fetched or built, the containers of `docker-compose.yml` run this: `/usr`, the
Python and the packages of this checkout are mounted read-only. User, environment and working
directory are those of `deploy/Dockerfile`; only the files are this machine's.
"""

import io
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
USER = 10001
OWNED = ("keys", "state", "region", "device", "runs")  # what volumes are first mounted on
LINKS = ("bin", "sbin", "lib", "lib64")


def archive() -> bytes:
    """Return the image's files, for `docker import -`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in LINKS:
            if Path("/usr", name).exists():
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
                tar.addfile(link)
        for name in ("usr", "etc", "proc", "sys", "dev", "run", "app", "cache"):
            tar.addfile(_folder(name, 0o755))
        tar.addfile(_folder("tmp", 0o1777))
        for name in OWNED:
            folder = _folder(name, 0o700)
            folder.uid = folder.gid = USER
            tar.addfile(folder)
        lines = f"root:x:0:0::/:/bin/sh\nregionfed:x:{USER}:{USER}::/state:/bin/sh\n".encode()
        users = tarfile.TarInfo("etc/passwd")
        users.size = len(lines)
        tar.addfile(users, io.BytesIO(lines))
    return out.getvalue()


def _folder(name: str, mode: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, mode
    return info


def changes() -> list[str]:
    """Return the Dockerfile's environment, user and folder, as `docker import --change` takes them.

    Paths of the image are replaced by those of this machine.
    """
    final = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    joined = re.sub(r"\\\n\s*", "", final)
    environment = dict(
        pair.split("=", 1)
        for line in joined.splitlines()
        if line.startswith("ENV ")
        for pair in line.removeprefix("ENV ").split()
    )
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/usr/sbin",
        "PYTHONPATH": str(ROOT),
    }
    kept = [line for line in joined.splitlines() if line.startswith(("USER ", "WORKDIR "))]
    return [*(f"ENV {key}={value}" for key, value in environment.items()), *kept]


def override(services: dict[str, Any]) -> dict[str, Any]:
    """Return a Compose file that mounts this machine's programs into every service."""
    folders: list[Path] = []
    for folder in (Path("/usr"), ROOT, Path(sys.prefix), Path(sys.base_prefix)):
        if not any(folder.is_relative_to(known) for known in folders):
            folders.append(folder)
    mounts = [
        {"type": "bind", "source": str(folder), "target": str(folder), "read_only": True}
        for folder in folders
    ]
    apps = {
        "type": "bind",
        "source": str(ROOT / "deploy"),
        "target": "/app/deploy",
        "read_only": True,
    }
    # An init would have to be written into the image.
    return {"services": {name: {"init": False, "volumes": [*mounts, apps]} for name in services}}
