"""What the published mechanism and formulas come to: the profile `paper`, run as it is.

    python -m benchmarks.paper

Implements      `profile="paper"`: the published signs, search, routing and mechanism (C = 1,
                sigma = 4, q = 0.1, T = 50 on each region's clipped mean); the same without noise;
                and without noise along the descent signs, to tell what noise and what signs do.
Dataset         the embedded retail queries: 8 regions of 10 devices of 600 examples.
Hyperparameters those of the profile; none is tuned.
Scores          last round; exact, as from a consenting panel.
Runs            seed 0, one per variant; a result that is there is not run again.
"""

import argparse
import statistics
from pathlib import Path

from benchmarks.default import measure
from benchmarks.rows import Row, fill
from regionfed.config import PROFILES, Value

# A profile replaces what has its practical default, the descent sign too: so all is said here.
PUBLISHED: dict[str, Value] = {
    name.replace("_", "-"): value for name, value in PROFILES["paper"].items()
}
VARIANTS: dict[str, dict[str, Value]] = {
    "as published": {"profile": "paper"},
    "without noise": {"profile": "paper", "privacy-mode": "none"},
    "without noise, descent signs": {**PUBLISHED, "privacy-mode": "none", "sign": "descent"},
}
SETTINGS: dict[str, Value] = {"evaluation-privacy": "panel", "evaluate-every": 1000}


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/paper.json"))
    parser.add_argument("--run-dir", default="runs", help="where the runs' folders go")
    options = parser.parse_args()
    fixed = {**SETTINGS, "seed": 0, "run-dir": options.run_dir}
    keys = [{"variant": variant} for variant in VARIANTS]
    rows = fill(options.json, keys, lambda key: measure({**fixed, **VARIANTS[key["variant"]]}))
    print("\n".join(table(rows)))


def table(rows: list[Row]) -> list[str]:
    """Return the results as a Markdown table, scores in points."""
    lines = [
        "| variant | epsilon of an example | global: mean / RRS | personalised: mean / RRS "
        "| median rho | routes |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        regions = row["regions"].values()
        ways = [region["strategy"] for region in regions]
        routes = ", ".join(f"{ways.count(way)} {way}" for way in dict.fromkeys(sorted(ways)))
        rho = statistics.median(region["rho"] for region in regions)
        scores = " | ".join(
            f"{100.0 * row[model]['mean']:.1f} / {100.0 * row[model]['rrs']:.1f}"
            for model in ("global", "personalised")
        )
        epsilon = "none" if row["epsilon"] is None else f"{row['epsilon']:.3g}"
        lines.append(f"| {row['variant']} | {epsilon} | {scores} | {rho:.3f} | {routes} |")
    return lines


if __name__ == "__main__":
    main()
