"""What a simulated round costs over the bare PyTorch loop that does the same passes.

    python -m benchmarks.speed --json benchmarks/results/speed.json

One process, one thread count, alternating: a round through Strategy, Grid, coordinators and
ClientApps, then the same forward and backward passes on the same batches without any of them.
Ratios, not seconds, are the result; seconds say how loaded the machine was.

* ``round / bare``: the whole round over the bare loop of its passes (per-example gradients, clipped
  and sketched). What is left is what federation costs: messages, samples, sums, noise, ledger.
* ``per-example / plain``: such a pass over a plain backward on the same batch, which is what
  privacy per example costs.
* ``memory``: growth of the process over rounds with few and with many devices.
"""

import argparse
import gc
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import ArrayRecord

from client_app.app import Device, workbench
from client_app.datasets.dataset import Example
from client_app.gradients import batches, clipped_sums
from client_app.identity import Identity
from regionfed.config import Config
from regionfed.durable import write_atomic
from regionfed.randomness import derive_seed
from regionfed.sketch import sketch_signs
from regionfed.vector import to_arrays
from server_app.federation import prepare
from server_app.run import simulate
from strategies.optimisers import OPTIMISERS
from strategies.regionfed import RegionFed


def main() -> None:
    """Measure and print."""
    options = _parse()
    torch.set_num_threads(options.threads)
    config = Config.from_run_config(
        {
            "workers": 1,
            "noise-seed": 0,  # the same samples in both loops; a timing releases nothing
            "evaluation-privacy": "off",
            "rounds": 10_000,
            "rho-every": 0,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        timer = Timer(config, Path(folder))
        rounds, bares, plains, privates = [], [], [], []
        for number in range(options.repeats + 1):
            seconds = _seconds(timer.round)
            timer.draw()
            pair = (seconds, _seconds(timer.bare))
            clip = (_seconds(timer.plain), _seconds(timer.private))
            if number:  # the first is a warm-up
                rounds.append(pair[0])
                bares.append(pair[1])
                plains.append(clip[0])
                privates.append(clip[1])
    result = {
        "round seconds": statistics.median(rounds),
        "bare seconds": statistics.median(bares),
        "round / bare": statistics.median(a / b for a, b in zip(rounds, bares, strict=True)),
        "plain seconds": statistics.median(plains),
        "per-example seconds": statistics.median(privates),
        "per-example / plain": statistics.median(
            a / b for a, b in zip(privates, plains, strict=True)
        ),
        "threads": options.threads,
        "repeats": options.repeats,
        "parameters": timer.bench.layout.size,
        "memory": [memory(devices) for devices in (2, 8)],
    }
    for key, value in result.items():
        print(f"{key:<22}{value:.4g}" if isinstance(value, float) else f"{key:<22}{value}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(options.json, (json.dumps(result, indent=1) + "\n").encode())


class Timer:
    """The two loops, over the same samples of the same devices."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.federation = prepare(config)
        self.bench = workbench(config)
        self._grid = simulate(config, self.federation, folder, run_id=1)
        self._strategy = RegionFed(
            config,
            OPTIMISERS.load(config.server_optimiser)(config.server_lr, config.server_momentum),
            self.federation.regions,
            self.federation.tasks,
            self.federation.layout.fingerprint,
            sketch_size=self.federation.plan.sketch_size,
        )
        self._arrays = ArrayRecord(to_arrays("theta", self.federation.theta))
        self._number = 0
        self.samples: list[list[Example]] = []
        self._one_region = 0

    def round(self) -> None:
        """Run one round through all tiers."""
        self._number += 1
        result = self._strategy.start(self._grid, self._arrays, num_rounds=self._number)
        self._arrays = result.arrays

    def bare(self) -> None:
        """Run the same forward and backward passes, and nothing else."""
        self._passes(self.samples)

    def plain(self) -> None:
        """Run plain backward passes on one region's batches."""
        for sample in self.samples[: self._one_region]:
            weights = {
                name: value.clone().requires_grad_()
                for name, value in self.bench.layout.tensors(self.federation.theta).items()
            }
            for batch in batches(sample, self.config.microbatch):
                self.bench.task.losses(weights, self.bench.task.encode(batch)).sum().backward()

    def private(self) -> None:
        """Run clipped and sketched per-example passes on the same batches."""
        self._passes(self.samples[: self._one_region])

    def _passes(self, samples: list[list[Example]]) -> None:
        seed = derive_seed(self.config.seed, "sketch")
        for sample in samples:
            clipped_sums(
                self.bench.task,
                self.bench.layout,
                self.federation.theta,
                sample,
                clip_norm=self.config.clip_norm,
                loss_cap=8.0,
                signs=sketch_signs(self.bench.layout, self.config.sketch_size, seed),
                microbatch=self.config.microbatch,
            )

    def draw(self) -> None:
        """Draw, outside of any timing, the samples that the last round drew."""
        self.samples = [
            Device.at(self.bench, Identity(name, index)).poisson_sample(
                self.config.sampling_rate, self._number, "sample"
            )
            for name, devices in self.federation.devices.items()
            for index in range(devices)
        ]
        self._one_region = next(iter(self.federation.devices.values()))


def memory(devices: int) -> dict[str, float]:
    """Return the growth of the peak memory (MB) over five rounds with so many devices a region."""
    config = Config.from_run_config(
        {
            "workers": 1,
            "regions": 2,
            "clients-per-region": devices,
            "examples-per-client": 300,
            "evaluation-privacy": "off",
            "rounds": 10_000,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        timer = Timer(config, Path(folder))
        timer.round()
        gc.collect()
        before = _peak()
        for _ in range(5):
            timer.round()
        return {"devices a region": devices, "growth MB": round(_peak() - before, 1)}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, default=5, help="pairs of measurements")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
