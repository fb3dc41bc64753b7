"""What an attacker can prove about one training: epsilon from below, against the ledger's.

    python -m benchmarks.canary_audit --json benchmarks/results/canary_audit.json

Implements      the one-run audit of Steinke, Nasr, Jagielski (2023) by two attacks on the same
                training. *Gradient* canaries are found in the updates that cross to the world;
                *text* canaries by how far training has lowered their loss.
Dataset         the embedded retail queries: 8 regions of 10 devices of 600 examples, plus, in each
                region, the canaries whose secret coin says so.
Hyperparameters the defaults of `regionfed.config`, except that no user's own model is made (it
                would stay on its device) and that scores are taken once.
Attacker        sees all updates and sizes that regions release, the model that a region's users
                get, the configuration, and the canaries but for their coins. What devices sample,
                their other examples and the coordinator's sums it does not see.
Guesses         numbers fixed beforehand in `CHOICES`, with Bonferroni; 95 % confidence.
Runs            one with the default privacy and one without noise, which shows that the attacks
                have power; a result that is there is not run again.
"""

import argparse
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord

from benchmarks import canaries as planted
from benchmarks.audit_statistics import Bools, Floats, best_bound, threshold_bound
from benchmarks.rows import Row, fill
from client_app.datasets.load import dataset_of
from client_app.task import Task
from region_app.state import StateFolder
from regionfed.config import Config
from regionfed.contract import RegionUpdate, decode
from regionfed.privacy.audit import audit
from regionfed.privacy.ledger import read_ledger
from regionfed.privacy.plan import TRAIN
from regionfed.vector import Layout, to_arrays
from server_app.federation import prepare
from server_app.run import simulate, strategy_of
from server_app.run_folder import RunFolder
from strategies.regionfed import Observer, RegionFed

CONFIDENCE = 0.95
# A Gaussian's standard deviation over its median absolute deviation; the least that is divided by.
_NORMAL, _LEAST = 1.4826, 1e-3
# Shares of the canaries guessed in and out. That one is in shows more than that it is out: one
# that is in may never be sampled.
CHOICES = [(0.02, 0.0), (0.05, 0.0), (0.1, 0.0), (0.25, 0.0), (0.45, 0.0), (0.25, 0.25)]
LEVELS: dict[str, dict[str, str | float]] = {"default": {}, "no noise": {"privacy-mode": "none"}}
SETTINGS: dict[str, str | int] = {
    "dataset": "benchmarks.canaries:load",
    "task": "benchmarks.canaries:make_task",
    "evaluate-every": 1000,
    "user-steps": 0,
}


def main() -> None:
    """Run what is missing and print the table."""
    options = _parse()
    changed = dict(pair.split("=", 1) for pair in options.set)

    def run(key: Row) -> Row:
        level = LEVELS[key["level"]]
        settings = {**SETTINGS, **level, **{k: _number(v) for k, v in changed.items()}}
        return measure(settings, options.run_dir, options.gradients, options.texts)

    keys = [{"level": level} for level in options.levels]
    print("\n".join(table(fill(options.json, keys, run))))


def table(rows: list[Row]) -> list[str]:
    """Return the results as a Markdown table."""
    lines = [
        "| training | epsilon of the ledger | attack | canaries | right guesses "
        "| epsilon is above, one-run bound | above, from error rates |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spent = "none" if row["epsilon"] is None else f"{row['epsilon']:.2f}"
        for attack, found in row["attacks"].items():
            b = found["bound"]
            lines.append(
                f"| {row['level']} | {spent} | {attack} | {b['canaries']:,} "
                f"| {b['right']:,} of {b['guessed_in'] + b['guessed_out']:,} | "
                f"{b['epsilon']:.2f} | {found['from rates']:.2f} |"
            )
    return lines


def measure(settings: Mapping[str, str | float], run_dir: str, gradients: int, texts: int) -> Row:
    """Plant canaries, train once, attack."""
    began = time.monotonic()
    folder = RunFolder.create(Path(run_dir)).path
    config = Config.from_run_config({**settings, "data-path": str(folder), "run-dir": run_dir})
    task = planted.make_task(config)
    regions = dataset_of(replace(config, dataset="retail")).regions
    canaries = planted.draw(config, task, regions, gradients=gradients, texts=texts)
    planted.save(canaries, folder)
    observed = train(config, folder, canaries.coordinates)
    # Scores by the noise of the private plan in both runs: without noise there is none to use.
    attacks = {
        "gradient canaries, from updates": (
            gradient_scores(observed, config),
            _flat(canaries.gradient_in),
        ),
        "text canaries, from losses": (
            text_scores(config, folder, task, canaries, observed.model),
            _flat(canaries.text_in),
        ),
    }
    # Kept beside the run, for whoever would guess otherwise.
    for name, (scores, included) in attacks.items():
        np.savez(folder / f"{name.split(maxsplit=1)[0]}-scores.npz", scores=scores, coins=included)
    return {
        "epsilon": observed.epsilon,
        "delta": config.delta,
        "confidence": CONFIDENCE,
        "noise_multiplier": observed.noise_multiplier,
        "seconds": round(time.monotonic() - began, 1),
        "attacks": {
            name: attack(scores, included, config.delta)
            for name, (scores, included) in attacks.items()
        },
        "config": {
            k: v for k, v in config.to_run_config().items() if k not in {"run-dir", "data-path"}
        },
    }


def attack(scores: Floats, included: Bools, delta: float) -> Row:
    """Return what the scores of canaries prove, and how they lie."""
    bound = best_bound(scores, included, CHOICES, delta, CONFIDENCE)
    return {
        "bound": asdict(bound),
        "from rates": threshold_bound(scores, included, delta, CONFIDENCE),
        "mean score": {
            "in": float(scores[included].mean()),
            "out": float(scores[~included].mean()),
        },
        "std of scores": {
            "in": float(scores[included].std()),
            "out": float(scores[~included].std()),
        },
    }


class Eavesdropper(RegionFed):
    """The Strategy as it is; it also writes down the updates that it is sent."""

    def watch(self, coordinates: list[int]) -> None:
        """Say which coordinates to write down."""
        self._coordinates = torch.tensor(coordinates)
        self.sums: dict[str, list[torch.Tensor]] = {}

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Write down the released sums at the coordinates, without the public denominator."""
        kept = list(replies)
        for message in (m for m in kept if not m.has_error()):
            update = decode(RegionUpdate, message.content, {})
            batch = self._config.sampling_rate * update.examples
            self.sums.setdefault(update.region, []).append(update.update[self._coordinates] * batch)
        return super().aggregate_train(server_round, kept)


@dataclass(frozen=True)
class Observed:
    """What an attacker has after a training, and what the ledgers claim.

    Attributes
    ----------
    sums : dict of str to array (T, m)
        By region: the released sum of each round at the coordinates of the canaries.
    model : torch.Tensor
        The global model, (p,).
    epsilon : float or None
        None where nothing was promised.
    noise_multiplier : float
    """

    sums: dict[str, Floats]
    model: torch.Tensor
    epsilon: float | None
    noise_multiplier: float


def train(config: Config, folder: Path, coordinates: list[int]) -> Observed:
    """Run the default recipe and listen where the world does."""
    federation = prepare(config)
    tell: list[Observer] = [
        lambda record, _: print(f"round {record.round}: {record.loss}", flush=True)
    ]
    strategy = strategy_of(Eavesdropper, config, federation, tell)
    strategy.watch(coordinates)
    with closing(simulate(config, federation, folder, 1)) as grid:
        strategy.start(
            grid,
            ArrayRecord(to_arrays("theta", federation.theta)),
            num_rounds=config.rounds,
            timeout=config.round_timeout,
        )
    ledgers = {
        name: read_ledger(folder / "regions" / name / "ledger.jsonl")
        for name in federation.regions.values()
    }
    spent = audit(ledgers, config.delta).spent[TRAIN].pld
    return Observed(
        # In the order of the regions, as the coins are; replies come as they are made.
        {name: torch.stack(strategy.sums[name]).double().numpy() for name in ledgers},
        strategy.state().average,
        spent if np.isfinite(spent) else None,
        federation.plan.update.noise_multiplier,
    )


def gradient_scores(observed: Observed, config: Config) -> Floats:
    """Return each gradient canary's log-likelihood ratio of in against out, region by region.

    In a round a canary that is in adds C with chance q to N(0, s^2), one that is out nothing:
    ``sum_t log(1 - q + q exp((x_t C - C^2 / 2) / s^2))``, the best test there is of that. s is
    what the attacker sees it to be: most canaries are not in the sample of a round, so that the
    median absolute deviation over them tells the noise, or what moves besides where there is none.
    """
    c, q = config.clip_norm, config.sampling_rate

    def scores(sums: Floats) -> Floats:
        centred = sums - np.median(sums, axis=1, keepdims=True)
        spread = _NORMAL * np.median(np.abs(centred), axis=1, keepdims=True)
        # A canary goes up its loss at +C: the gradient of slope * w is positive.
        gain = (centred * c - 0.5 * c * c) / np.maximum(spread, _LEAST * c) ** 2
        total: Floats = np.logaddexp(np.log1p(-q), np.log(q) + gain).sum(0)
        return total

    return np.concatenate([scores(sums) for sums in observed.sums.values()])


def text_scores(
    config: Config, folder: Path, task: Task, canaries: planted.Canaries, model: torch.Tensor
) -> Floats:
    """Return how far training has lowered the loss of each text canary, region by region.

    Judged by the model that the region's users get, theta + alpha_r theta_r.
    """
    layout = Layout.of(task.module)
    start = layout.read(task.module)
    scores = []
    for region, texts in canaries.texts.items():
        state = StateFolder(folder / "regions" / region).load(config.rounds)
        own = torch.zeros_like(model) if state is None else state.own_part()
        batch = task.encode([planted.text_canary(text) for text in texts])
        with torch.no_grad():
            before, after = (
                task.losses(layout.tensors(point), batch) for point in (start, model + own)
            )
        scores.append((before - after).double().numpy())
    return np.concatenate(scores)


def _flat(coins: Mapping[str, list[bool]]) -> Bools:
    return np.array([coin for region in coins.values() for coin in region])


def _number(text: str) -> str | float:
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/canary_audit.json"))
    parser.add_argument("--levels", nargs="+", choices=list(LEVELS), default=list(LEVELS))
    parser.add_argument("--gradients", type=int, default=1000, help="gradient canaries a region")
    parser.add_argument("--texts", type=int, default=125, help="text canaries a region")
    parser.add_argument("--run-dir", default="runs", help="where the runs' folders go")
    parser.add_argument("--set", nargs="*", default=[], help="other settings, as key=value")
    return parser.parse_args()


if __name__ == "__main__":
    main()
