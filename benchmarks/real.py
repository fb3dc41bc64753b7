"""What personalisation gains on real queries: the default job, by configuration alone.

    python -m benchmarks.real --data-path <folder of the ESCI, QueryNER and spelling files>

Implements      the default job (RegionFed with the accumulated residual), epsilon 4.
Dataset         `client_app/datasets/esci.py`: about 11,000 training examples over 8 regions of 10
                devices, Dirichlet 0.3 over labels.
Hyperparameters the defaults of `regionfed.config`: chosen on the embedded queries, not on these.
Scores          last round; exact, as from a consenting panel; no round is chosen by its score.
Runs            seeds 0, 1, 2; a result that is there is not run again.
"""

import argparse
from pathlib import Path

from benchmarks.default import SETTINGS, measure, scores_of
from benchmarks.rows import Row, fill


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data-path", type=Path, required=True, help="folder of the files")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/real.json"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--run-dir", default="runs", help="where the runs' folders go")
    options = parser.parse_args()
    where = {"data-path": str(options.data_path.resolve()), "run-dir": options.run_dir}

    def run(key: Row) -> Row:
        row = measure({**SETTINGS, **where, "dataset": "esci", **key})
        row["config"].pop("data-path")
        return row

    keys = [{"seed": seed} for seed in options.seeds]
    print("\n".join(table(fill(options.json, keys, run))))


def table(rows: list[Row]) -> list[str]:
    """Return the results as a Markdown table, in points: a line per seed, and the mean."""
    lines = [
        "| seed | own global model: mean / RRS | personalised: mean / RRS |",
        "|---|---|---|",
    ]
    for name, part in [*((str(row["seed"]), [row]) for row in rows), ("mean", rows)]:
        cells = [scores_of(part, model) for model in ("global", "personalised")]
        line = " | ".join(f"{mean:.1f} / {rrs:.1f}" for mean, rrs in cells)
        lines.append(f"| {name} | {line} |")
    return lines


if __name__ == "__main__":
    main()
