"""How noisy a model is where sampling is not trusted: independent against banded noise.

    python -m benchmarks.correlated_noise --json benchmarks/results/correlated_noise.json

Implements      the noise that `regionfed.privacy.banded` puts on a model, by its formula: no
                training. Independent noise amplified by Poisson sampling stands beside it, for what
                trust in the sampling is worth.
Hyperparameters 25 rounds, momentum 0.5, clip norm 0.5, delta 1e-5: the defaults. Examples take
                part every 7th round, a batch like that of the default sampling rate, 0.15.
Measure         rms over rounds of the noise on a weight, for a step of 1 on the *sum* of a batch:
                the server's step over the expected batch scales all rows alike.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np

from regionfed.config import Config
from regionfed.durable import write_atomic
from regionfed.privacy.banded import BandedMechanism, least_banded_noise, workload
from regionfed.privacy.planner import PROTECTIONS, Plan, complete

Row = dict[str, str | float]

SEPARATION = 7
BANDS = (1, 2, 4, 7)


def main() -> None:
    """Compute the table, print it and keep it."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks/results/correlated_noise.json")
    )
    path: Path = parser.parse_args().json
    found = [row for epsilon in (1.0, 4.0) for row in rows(epsilon, Config())]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(found, indent=1) + "\n").encode())
    print("\n".join(table(found)))


def rows(epsilon: float, config: Config) -> list[Row]:
    """Return the noise on the model at one epsilon, by mechanism."""
    rounds, momentum, c = config.rounds, config.server_momentum, config.clip_norm
    sampled = complete(
        Plan(epsilon, None, rounds, 1.0 / SEPARATION, config.delta), PROTECTIONS[0]
    ).noise_multiplier
    size = float(np.linalg.norm(workload(rounds, momentum))) / math.sqrt(rounds)
    amplified = (sampled or math.inf) * c * size
    found: list[Row] = [
        {"epsilon": epsilon, "noise": "independent, secret sampling", "error": amplified}
    ]
    for bands in BANDS:
        z = least_banded_noise(epsilon, config.delta)
        mechanism = BandedMechanism(rounds, bands, SEPARATION, z, c, momentum)
        name = f"{bands} bands" if bands > 1 else "independent"
        found.append({"epsilon": epsilon, "noise": name, "error": mechanism.rms_error()})
    return found


def table(found: list[Row]) -> list[str]:
    """Return the results as a Markdown table."""
    lines = ["| epsilon | noise | rms noise on a weight |", "|---|---|---|"]
    return lines + [f"| {r['epsilon']:g} | {r['noise']} | {r['error']:.2f} |" for r in found]


if __name__ == "__main__":
    main()
