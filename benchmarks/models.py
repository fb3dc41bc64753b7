"""Every model and dataset by one key, shortly: scores of the global and the regions' own models.

    python -m benchmarks.models --data-path <folder of the files>

Implements      RegionFed with the accumulated residual, the presets of the setting `benchmark`.
Dataset         see docs/models.md; where published sets are absent, what stands in for them.
Hyperparameters the presets, untuned; fewer rounds than the default and exact scores of a panel.
                RoBERTa and the CNN start from random weights: these are checks that all of it runs,
                not what the models can do.
Scores          last round, mean over regions and the worst region (RRS); no round is chosen.
Runs            one per key and level of privacy; a result that is there is not run again.
"""

import argparse
from pathlib import Path

from benchmarks.default import LEVELS, measure, scores_of
from benchmarks.rows import Row, fill
from client_app.datasets.load import dataset_of
from client_app.datasets.reviews import missing
from client_app.datasets.shared import SharedDataset
from regionfed.config import BENCHMARKS, Config

KEYS = tuple(key for key in BENCHMARKS if key)
SETTINGS = {"evaluation-privacy": "panel", "evaluate-every": 1000, "user-steps": 0}


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data-path", required=True, help="folder of the files")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/models.json"))
    parser.add_argument("--keys", nargs="+", choices=KEYS, default=list(KEYS))
    parser.add_argument("--levels", nargs="+", choices=list(LEVELS), default=["epsilon 4"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--run-dir", default="runs", help="where the runs' folders go")
    options = parser.parse_args()

    def run(key: Row) -> Row:
        row = measure(
            {
                **SETTINGS,
                **LEVELS[key["level"]],
                "benchmark": key["benchmark"],
                "rounds": key["rounds"],
                "data-path": options.data_path,
                "run-dir": options.run_dir,
            }
        )
        row["missing"] = _missing(key["benchmark"], options.data_path)
        row["config"].pop("data-path")
        return row

    keys = [
        {"level": level, "benchmark": name, "rounds": options.rounds}
        for level in options.levels
        for name in options.keys
    ]
    print("\n".join(table(fill(options.json, keys, run))))


def table(rows: list[Row]) -> list[str]:
    """Return the results as a Markdown table, in points."""
    lines = [
        "| benchmark | model | regions | privacy | rounds | global: mean / RRS "
        "| personalised: mean / RRS |",
        "|---|---|---:|---|---:|---|---|",
    ]
    for row in rows:
        cells = [scores_of([row], model) for model in ("global", "personalised")]
        scores = " | ".join(f"{mean:.1f} / {rrs:.1f}" for mean, rrs in cells)
        lines.append(
            f"| {row['benchmark']} | {row['config']['model']} | {len(row['regions'])} "
            f"| {row['level']} | {row['rounds']} | {scores} |"
        )
    return lines


def _missing(key: str, path: str) -> dict[str, list[str]]:
    """Return the classes that regions of a benchmark lack, where that is known to matter."""
    if key != "reviews":
        return {}
    dataset = dataset_of(Config.from_run_config({"benchmark": key, "data-path": path}))
    return missing(dataset) if isinstance(dataset, SharedDataset) else {}


if __name__ == "__main__":
    main()
