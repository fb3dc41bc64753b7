"""Choose the step sizes of each job on validation examples.

    python -m benchmarks.tuning

Dataset         the embedded queries; a tenth of the kinds of query is kept out of training and
                judges (`held-out=validation`); test examples are never looked at.
Budget          five settings for RegionFed and for its baseline; two for Meta and one for
                Grad, whose steps are scaled by a search anyway; epsilon 4, seed 0.
Rule            the setting with the best worst region (RRS) of the model that the job is about:
                personalised, or global where there is no personalisation.
"""

import argparse
from pathlib import Path

from benchmarks.default import SETTINGS, measure
from benchmarks.rows import Row, fill

Setting = dict[str, float | int]

GRIDS: dict[str, list[Setting]] = {
    "residual": [
        {"server-lr": 10.0, "residual-step": 8.0},
        {"server-lr": 10.0, "residual-step": 16.0},
        {"server-lr": 10.0, "residual-step": 24.0},
        {"server-lr": 5.0, "residual-step": 16.0},
        {"server-lr": 10.0, "residual-step": 36.0},
    ],
    "none": [
        *({"server-lr": step} for step in (5.0, 10.0, 20.0, 40.0)),
        {"server-lr": 10.0, "server-momentum": 0.9},
    ],
    # The search for rho scales this step by 0.5 to 2 at each use, so that little hangs on it.
    "meta": [{"server-lr": 20.0, "personal-step": step} for step in (16.0, 48.0)],
    "grad": [{"server-lr": 20.0, "personal-step": 16.0}],
}


def main() -> None:
    """Run what is missing and print the table; `*` marks the choice."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/tuning.json"))
    parser.add_argument("--jobs", nargs="+", choices=list(GRIDS), default=list(GRIDS))
    parser.add_argument("--run-dir", default="runs", help="where the runs' folders go")
    options = parser.parse_args()
    fixed = {**SETTINGS, "held-out": "validation", "run-dir": options.run_dir}
    keys = [
        {"personaliser": personaliser, "setting": setting}
        for personaliser in options.jobs
        for setting in GRIDS[personaliser]
    ]

    def run(key: Row) -> Row:
        return measure({**fixed, **key["setting"], "personaliser": key["personaliser"]})

    print("\n".join(table(fill(options.json, keys, run))))


def table(rows: list[Row]) -> list[str]:
    """Return the validation scores as a Markdown table, in points."""
    lines = ["| job | setting | mean / RRS | chosen |", "|---|---|---|---|"]
    for personaliser in GRIDS:
        mine = [row for row in rows if row["personaliser"] == personaliser]
        best = max(mine, key=lambda row: float(_judged(row)["rrs"]), default=None)
        for row in mine:
            setting = ", ".join(f"{key} {value:g}" for key, value in row["setting"].items())
            score = _judged(row)
            cell = f"{100 * score['mean']:.1f} / {100 * score['rrs']:.1f}"
            lines.append(f"| {personaliser} | {setting} | {cell} | {'*' * (row is best)} |")
    return lines


def _judged(row: Row) -> dict[str, float]:
    model = "global" if row["personaliser"] == "none" else "personalised"
    scores: dict[str, float] = row[model]
    return scores


if __name__ == "__main__":
    main()
