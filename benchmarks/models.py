"""Every model and dataset by one key, shortly: scores of the global and the regions' own models.

    python -m benchmarks.models --data-path <folder of the files>

Implements      RegionFed with the accumulated residual, the presets of the setting `benchmark`.
Dataset         see docs/models.md; where published sets are absent, what stands in for them.
                "own" is a project as `regionfed new` makes it, with its rows as a CSV file.
Hyperparameters the presets, untuned; fewer rounds than the default and exact scores of a panel.
                RoBERTa and the CNN start from random weights: these are checks that all of it runs,
                not what the models can do.
Scores          last round, mean over regions and the worst region (RRS); no round is chosen.
Runs            one per key and level of privacy; a result that is there is not run again.
"""

import argparse
import csv
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.default import LEVELS, measure, scores_of
from benchmarks.rows import Row, fill
from client_app.datasets.load import dataset_of
from client_app.datasets.reviews import missing
from client_app.datasets.shared import SharedDataset
from regionfed.config import BENCHMARKS, Config
from server_app.cli.new import settings_of, write_project

OWN = "own"
KEYS = (*(key for key in BENCHMARKS if key), OWN)
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
        with TemporaryDirectory() as folder:
            job = (
                own_project(Path(folder) / "own_words")
                if key["benchmark"] == OWN
                else {"benchmark": key["benchmark"], "data-path": options.data_path}
            )
            row = measure(
                {
                    **job,
                    **SETTINGS,
                    **LEVELS[key["level"]],
                    "rounds": key["rounds"],
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


def own_project(folder: Path) -> dict[str, Any]:
    """Make a project of one's own, its rows as CSV; return its settings."""
    write_project(folder.name, folder)
    rows = folder / "data" / "queries.jsonl"
    found = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    with (folder / "data" / "queries.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)
    rows.unlink()
    sys.path.insert(0, str(folder))
    # Worker processes would not find what no installation knows of.
    return {**settings_of(folder.name, folder), "workers": 1}


def _missing(key: str, path: str) -> dict[str, list[str]]:
    """Return the classes that regions of a benchmark lack, where that is known to matter."""
    if key != "reviews":
        return {}
    dataset = dataset_of(Config.from_run_config({"benchmark": key, "data-path": path}))
    return missing(dataset) if isinstance(dataset, SharedDataset) else {}


if __name__ == "__main__":
    main()
