"""What personalisation gains on the embedded default, at three levels of privacy.

    python -m benchmarks.default --json benchmarks/results/default.json

Implements      RegionFed with each personaliser, against the same job without
                personalisation (personaliser='none', rho = 0) at equal budget: each plans its own
                noise for the same epsilon, so the baseline pays for no sketch and no vote.
Dataset         the embedded retail queries: 8 regions of 10 devices of 600 examples.
Hyperparameters the defaults of `regionfed.config`, except what `SETTINGS` and `LEVELS` say; steps
                of `residual` and `none` chosen on validation examples with equal budgets
                (benchmarks/tuning.py). The others have the global step of `none` and one step
                of their own, which the search for rho scales in each run.
Scores          last round; exact, as from a consenting panel; no round is chosen by its score.
Runs            one per (level, personaliser, seed); a result that is there is not run again.
"""

import argparse
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks.rows import Row, fill
from regionfed.config import Config
from server_app.run import execute

LEVELS: dict[str, dict[str, str | float]] = {
    "epsilon 4": {"target-epsilon": 4.0},
    "epsilon 1": {"target-epsilon": 1.0},
    "no noise": {"privacy-mode": "none"},
}
PERSONALISERS = ("residual", "none", "grad", "interp", "meta", "dynamic")
# Steps that did best on validation examples: benchmarks/tuning.py.
TUNED: dict[str, dict[str, float]] = {
    "residual": {"server-lr": 10.0, "residual-step": 24.0},
    "none": {"server-lr": 20.0},
    **{
        name: {"server-lr": 20.0, "personal-step": 48.0}
        for name in ("grad", "interp", "meta", "dynamic")
    },
}
SETTINGS: dict[str, str | int] = {
    "evaluation-privacy": "panel",
    "evaluate-every": 1000,
    "user-steps": 0,
}


def main() -> None:
    """Run what is missing and print the table."""
    options = _parse()
    keys = [
        {"level": level, "personaliser": personaliser, "seed": seed}
        for level in options.levels
        for seed in options.seeds
        for personaliser in options.personalisers
    ]
    print("\n".join(table(fill(options.json, keys, partial(_run, options.run_dir)))))


def table(rows: list[Row]) -> list[str]:
    """Return the results as a Markdown table: means over seeds, in points."""
    lines = [
        "| privacy | personaliser | seeds | no personalisation: mean / RRS "
        "| own global model: mean / RRS | personalised: mean / RRS | RRS gain over both |",
        "|---|---|---|---|---|---|---|",
    ]
    for level, name in dict.fromkeys((row["level"], row["personaliser"]) for row in rows):
        mine = [r for r in rows if r["level"] == level and r["personaliser"] == name]
        seeds = [row["seed"] for row in mine]
        base = [
            r
            for r in rows
            if r["level"] == level and r["personaliser"] == "none" and r["seed"] in seeds
        ]
        if name == "none" or len(base) < len(mine):
            continue
        columns = [
            scores_of(base, "global"),
            scores_of(mine, "global"),
            scores_of(mine, "personalised"),
        ]
        cells = " | ".join(f"{mean:.1f} / {rrs:.1f}" for mean, rrs in columns)
        gain = columns[2][1] - max(columns[0][1], columns[1][1])
        lines.append(f"| {level} | {name} | {', '.join(map(str, seeds))} | {cells} | {gain:+.1f} |")
    return lines


def scores_of(rows: list[Row], model: str) -> tuple[float, float]:
    """Return mean and RRS of a model ("global" or "personalised"), in points, over some runs."""
    return (
        100.0 * statistics.fmean(row[model]["mean"] for row in rows),
        100.0 * statistics.fmean(row[model]["rrs"] for row in rows),
    )


def _run(run_dir: str, key: Row) -> Row:
    name, level = key["personaliser"], LEVELS[key["level"]]
    settings = {**SETTINGS, **TUNED.get(name, {}), **level, "run-dir": run_dir}
    return measure({**settings, "seed": key["seed"], "personaliser": name})


def measure(settings: Mapping[str, object]) -> Row:
    """Run the job with some settings and return what is kept of it."""
    summary = execute(Config.from_run_config(settings))
    return {
        "status": summary.status,
        "rounds": summary.rounds,
        "epsilon": summary.privacy.epsilon,
        "delta": summary.privacy.delta,
        "noise_multiplier": summary.privacy.noise_multiplier,
        "seconds": round(summary.seconds, 1),
        "global": {"mean": summary.global_.mean, "rrs": summary.global_.rrs},
        "personalised": {"mean": summary.personalised.mean, "rrs": summary.personalised.rrs},
        "regions": {
            name: {
                "conflict": record.conflict,
                "alpha": record.alpha,
                "rho": record.rho,
                "strategy": record.strategy,
                "reason": record.reason,
                "global": record.global_,
                "personalised": record.personalised,
            }
            for name, record in summary.regions.items()
        },
        "versions": summary.versions,
        "config": {k: v for k, v in summary.config.items() if k != "run-dir"},
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/default.json"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--levels", nargs="+", choices=list(LEVELS), default=list(LEVELS))
    parser.add_argument(
        "--personalisers", nargs="+", choices=PERSONALISERS, default=list(PERSONALISERS)
    )
    parser.add_argument("--run-dir", default="runs", help="where the runs' folders go")
    return parser.parse_args()


if __name__ == "__main__":
    main()
