"""What a pass of per-example gradients holds at its peak, with and without checkpointing.

    python -m benchmarks.activations --json benchmarks/results/activations.json

Each case runs a microbatch through `example_gradients` at true shapes, at random weights, and
reads from PyTorch's profiler the most bytes that its tensors held at once, beyond the model and the
request: activations and the gradients of single examples. Time is that of the same passes with
checkpointing over without; a case has a process of its own. T5-3B takes 17 GiB of memory to start
with and minutes on a processor.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.memory_plan import LORA_TARGETS, RANK, in_bytes
from client_app.datasets.dataset import Example
from client_app.gradients import example_gradients
from client_app.recompute import recompute_blocks
from client_app.task import task_of
from regionfed.config import Config
from regionfed.durable import write_atomic
from regionfed.vector import Layout

WORDS = "red shoes for a garden table and some green tea "


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and what it reads: `microbatch` texts of `length` tokens."""

    model: str
    training: str
    precision: str
    length: int
    microbatch: int
    repeats: int = 3

    def settings(self) -> dict[str, bool | int | float | str]:
        """Return the run's settings that it stands for."""
        family = self.model.partition(":")[0]
        lora = self.training == "lora"
        return {
            "task": "labels" if family == "roberta" else "text-to-text",
            "model": self.model,
            "trainable": LORA_TARGETS[family].removesuffix("$") if lora else "",
            "lora-rank": RANK if lora else 0,
            "precision": self.precision,
            "max-length": self.length,
            "device": "cpu",
        }


CASES = (
    Case("t5:small", "full", "fp32", 32, 8),
    Case("t5:base", "lora", "fp32", 32, 8),
    Case("t5:base", "lora", "fp32", 256, 8),
    Case("roberta:base", "lora", "fp32", 128, 8),
    Case("roberta:base", "lora", "fp32", 512, 8),
    Case("t5:3b", "lora", "bf16", 32, 8, repeats=1),
    Case("t5:3b", "lora", "bf16", 256, 8, repeats=1),
)


@dataclass(frozen=True)
class Measured:
    """Bytes at the peak of a pass, and its seconds with checkpointing over without."""

    peak: int
    peak_checkpointing: int
    time_ratio: float
    trained: int


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes that tensors made by `work` held at once on the processor."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    held = peak = 0
    events = seen.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def measure(case: Case) -> Measured:
    """Run a case's passes, on the same weights and texts."""
    settings = case.settings()
    plain = Config.from_run_config(settings)
    task = task_of(plain)
    layout = Layout.of(task.module)
    weights = layout.tensors(layout.read(task.module))
    texts = [
        Example("intent", WORDS * case.length, "footwear", str(i)) for i in range(case.microbatch)
    ]
    batch = task.encode(texts)

    def one_pass() -> None:
        example_gradients(task, weights, batch)

    peak = peak_bytes(one_pass)
    seconds = [_seconds(one_pass) for _ in range(case.repeats)]
    recompute_blocks(task.module)
    peak_checkpointing = peak_bytes(one_pass)
    again = [_seconds(one_pass) for _ in range(case.repeats)]
    ratio = statistics.median(again) / statistics.median(seconds)
    return Measured(peak, peak_checkpointing, round(ratio, 2), layout.size)


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def split(row: dict[str, Any]) -> tuple[Case, Measured]:
    """Return a row of the results as what was measured of what."""
    case, measured = ({f.name: row[f.name] for f in fields(kind)} for kind in (Case, Measured))
    return Case(**case), Measured(**measured)


def table(rows: list[tuple[Case, Measured]]) -> list[str]:
    """Return the measurements as a Markdown table."""
    lines = [
        "| model | training | tokens | microbatch | peak | with checkpointing | time |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {case.model} | {case.training}, {case.precision} | {case.length} | {case.microbatch} "
        f"| {in_bytes(one.peak)} | {in_bytes(one.peak_checkpointing)} | x {one.time_ratio:.1f} |"
        for case, one in rows
    ]
    return lines


def main() -> None:
    """Measure, print the table, and write it as JSON if told where."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--only", default="", help="models whose name starts so")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        if case.model.startswith(options.only):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                rows.append((case, process.submit(measure, case).result()))
            print(f"{case.model}, {case.length} tokens: done", flush=True)
    print("\n".join(table(rows)))
    if options.json:
        text = json.dumps([asdict(case) | asdict(one) for case, one in rows], indent=1) + "\n"
        write_atomic(options.json, text.encode())


if __name__ == "__main__":
    main()
