"""What secure aggregation costs: one exchange of a vector over the devices of a region.

    python -m benchmarks.secure_aggregation --json benchmarks/results/secure_aggregation.json

Measures        each step by itself, per device and for the coordinator: keys and shares, noise and
                fixed point, masks (one keystream for each other device and one for itself), the
                coordinator's sum, and unmasking with no drop-out and with as many as are tolerated.
Input           a vector of zeros: no step's time depends on the values. Keys are real.
Hyperparameters tolerated-dropouts 0.3 and tolerated-colluders 0.1, the defaults; C = 0.5, z = 1.
Time            wall-clock and processor seconds of one process; the processor's are what to read
                where other work shares the machine. No message is sent: Flower's time is not here.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from regionfed.config import Config
from regionfed.durable import write_atomic
from regionfed.randomness import secure_randomness
from regionfed.secure_aggregation import device
from regionfed.secure_aggregation.fixed_point import FixedPoint, Ring, fixed_point
from regionfed.secure_aggregation.messages import Advert
from regionfed.secure_aggregation.terms import Terms, tolerance_of
from regionfed.secure_aggregation.unmasking import remove_masks

T = TypeVar("T")
Row = dict[str, Any]


def main() -> None:
    """Measure, write the rows down and print the table."""
    options = _parse()
    rows = [measure(options.devices, length) for length in options.lengths]
    path: Path = options.json
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n").encode())
    print("\n".join(table(rows)))


def measure(devices: int, length: int) -> Row:
    """Return the processor and wall-clock seconds of each step for a vector of some length."""
    terms = _terms(devices, length)
    fixed = fixed_point(terms)
    clock = _Clock()
    identities = [Ed25519PrivateKey.generate() for _ in range(devices)]
    opened = clock.each(
        "device: advertise", lambda i: device.advertise(terms, i, identities[i]), devices
    )
    sessions = [session for session, _ in opened]
    adverts = [advert for _, advert in opened]
    shared = clock.each("device: share", lambda i: device.share(sessions[i], adverts, {}), devices)
    boxes = [{s: shared[s][1][i] for s in range(devices) if s != i} for i in range(devices)]
    sessions = [session for session, _ in shared]
    sessions = clock.each(
        "device: open shares", lambda i: device.mask(sessions[i], boxes[i]), devices
    )
    total, everybody = fixed.zeros(), list(range(devices))
    late = everybody[devices - terms.dropouts :]
    some = fixed.zeros()
    zeros = torch.zeros(length)
    for i in everybody:
        vector = clock.time("device: noise and fixed point", _encode, fixed, zeros)
        clock.time("device: masks", device.add_masks, sessions[i], vector)
        clock.time("coordinator: add a reply", _add, total, vector)
        if i not in late:
            some += vector
        del vector
    found = {a.device: a for a in map(Advert.unpack, adverts)}
    for name, left, masked in (
        ("nobody dropped out", everybody, total),
        (f"{len(late)} dropped out", everybody[: devices - len(late)], some),
    ):
        signatures = {}
        agreed = {}
        for i in left:
            agreed[i], signatures[i] = device.agree(sessions[i], left, identities[i])
        given = {i: device.unmask(agreed[i], signatures)[1] for i in left}
        clock.time(
            f"coordinator: unmask, {name}",
            remove_masks,
            masked,
            terms.digest,
            found,
            sharers=everybody,
            survivors=left,
            given=given,
        )
        std = float(fixed.decode(masked)["total"].std())
        # What is measured is only worth something if the masks are off.
        share = fixed.segments[0].share_steps * fixed.segments[0].step
        assert 0.9 < std / (share * len(left) ** 0.5) < 1.1
    return {
        "devices": devices,
        "length": length,
        "ring bits": fixed.bits,
        "MB a reply": round(length * fixed.bits / 8e6, 1),
        "steps": clock.means(),
    }


def _encode(fixed: FixedPoint, values: torch.Tensor) -> Ring:
    return fixed.encode({"total": values}, secure_randomness("benchmark"))


def _add(total: Ring, vector: Ring) -> None:
    total += vector


def _terms(devices: int, length: int) -> Terms:
    tolerance = tolerance_of(Config(), devices)
    return Terms(
        run="0",
        round=1,
        message_type="train.gradient",
        number=0,
        nonce="00",
        devices=devices,
        dropouts=tolerance.dropouts,
        colluders=tolerance.colluders,
        fields=["total"],
        lengths=[length],
        bounds=[0.5],
        noise=[1.0],
        examples=600,
    )


class _Clock:
    """Seconds by step: wall-clock and of this process."""

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[float, float]]] = {}

    def time(self, name: str, work: Callable[..., T], *given: Any, **named: Any) -> T:
        wall, cpu = time.perf_counter(), time.process_time()
        out = work(*given, **named)
        took = (time.perf_counter() - wall, time.process_time() - cpu)
        self._seen.setdefault(name, []).append(took)
        return out

    def each(self, name: str, work: Callable[[int], T], count: int) -> list[T]:
        return [self.time(name, work, i) for i in range(count)]

    def means(self) -> dict[str, dict[str, float]]:
        return {
            name: {
                "wall seconds": round(sum(w for w, _ in seen) / len(seen), 4),
                "processor seconds": round(sum(c for _, c in seen) / len(seen), 4),
                "times": len(seen),
            }
            for name, seen in self._seen.items()
        }


def machine() -> Row:
    """Return what the numbers depend on."""
    return {
        "processors": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
    }


def table(rows: list[Row]) -> list[str]:
    """Return the rows as a Markdown table: processor seconds (wall-clock seconds)."""
    heads = [f"{row['length']:,} x {row['devices']} devices" for row in rows]
    names = dict.fromkeys(name for row in rows for name in row["steps"])
    lines = [f"| step | {' | '.join(heads)} |", "|---|" + "---|" * len(rows)]
    for name in names:
        took = [row["steps"].get(name) for row in rows]
        cells = [
            f"{t['processor seconds']:.3g} ({t['wall seconds']:.3g})" if t else "" for t in took
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks/results/secure_aggregation.json")
    )
    parser.add_argument("--devices", type=int, default=10)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_000_000, 60_000_000])
    return parser.parse_args()


if __name__ == "__main__":
    main()
