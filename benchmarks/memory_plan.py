"""What a model costs each tier, in bytes: on the links, on a device, in a region, in the world.

    python -m benchmarks.memory_plan --json benchmarks/results/memory_plan.json

Nothing is run: models are built at their true shapes on PyTorch's meta device, adapters put in by
peft, and what is trained is counted as `regionfed.vector.Layout` counts it. LoRA is of the
attention's q and v.

* wire: the vector that crosses, 4 bytes a number, and the chunks that it is cut into;
* device: weights in their precision, once in the module and once as those of the request where they
  are trained; the gradients of a microbatch; and as many vectors as messages and sums were seen to
  take (`DEVICE`). Activations come on top: `benchmarks.activations` measures them;
* coordinator, uplink and world: as many vectors of that length as each was seen to hold at once
  (`COORDINATOR`, `UPLINK`, `WORLD`); what Python and PyTorch take by themselves comes on top. A
  world builds the model when it starts, 4 bytes a weight: it has at least that.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from client_app.models import FAMILIES, add_lora, select_trainable
from regionfed.config import Config
from regionfed.durable import write_atomic
from regionfed.vector import CHUNK, Layout

LORA_TARGETS = {
    "t5": r"Attention\.(q|v)\.weight$",
    "roberta": r"attention\.self\.(query|value)\.weight$",
}
RANK = 16
MICROBATCH = 8
BYTES = {"fp32": 4, "bf16": 2}
TRAINING = {"full": "full", "lora": "LoRA"}
# Vectors that each held at its peak, as `benchmarks.latency` measured with T5-small: what a process
# was resident with, over the same process with 641 numbers. Flower's copies are among them.
DEVICE = 11  # besides two of the weights and a gradient for each example
COORDINATOR = 15
UPLINK = 7
# With one region; each further one adds its update, as a record and as bytes.
WORLD, WORLD_PER_REGION = 16, 2
REGIONS = 8
MODELS = (
    ("t5", "small"),
    ("t5", "base"),
    ("t5", "large"),
    ("t5", "3b"),
    ("roberta", "base"),
    ("roberta", "large"),
)


@dataclass(frozen=True)
class Plan:
    """Sizes in numbers (parameters, trained) and in bytes (the rest)."""

    model: str
    training: str
    precision: str
    parameters: int
    trained: int
    wire: int
    chunks: int
    device: int
    coordinator: int
    uplink: int
    world: int


def plan(family: str, size: str, training: str, precision: str) -> Plan:
    """Return what one way of training one model costs."""
    kind = FAMILIES[family]
    with torch.device("meta"):
        module = kind.model(kind.config(**kind.fixed, **kind.sizes[size]))
        whole = Layout.of(module).size
        if training == "lora":
            module = add_lora(module, RANK, LORA_TARGETS[family])
            for name, parameter in module.named_parameters():
                parameter.requires_grad_("lora_" in name)
        else:
            select_trainable(module, "")
        trained = Layout.of(module).size
    frozen = whole if training == "lora" else 0
    # Module and request hold the trained weights once each; a gradient for each example.
    number = BYTES[precision]
    # peft keeps adapters in float32.
    own = 4 if training == "lora" else number
    held = frozen * number + (2 + MICROBATCH) * trained * own
    return Plan(
        model=f"{family}:{size}",
        training=training,
        precision=precision,
        parameters=whole,
        trained=trained,
        wire=4 * trained,
        chunks=-(-trained // CHUNK),
        device=held + DEVICE * 4 * trained,
        coordinator=COORDINATOR * 4 * trained,
        uplink=UPLINK * 4 * trained,
        world=max(4 * whole, (WORLD + WORLD_PER_REGION * (REGIONS - 1)) * 4 * trained),
    )


def table(plans: Sequence[Plan]) -> list[str]:
    """Return the plans as a Markdown table."""
    lines = [
        f"| model | training | trained | on the wire | chunks | device (microbatch {MICROBATCH}) "
        f"| coordinator | uplink | world ({REGIONS} regions) |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in plans:
        sizes = [one.device, one.coordinator, one.uplink, one.world]
        lines.append(
            f"| {one.model} | {TRAINING[one.training]}, {one.precision} "
            f"| {one.trained / 1e6:,.2f} M | {in_bytes(one.wire)} | {one.chunks} "
            f"| {' | '.join(map(in_bytes, sizes))} |"
        )
    return lines


def traffic(wire: int, config: Config) -> dict[str, float]:
    """Return bytes a round on a link: the mean over the rounds of a run.

    Region: theta down, the update up; then theta and the mean update down. Device: a point down,
    the sum up; two vectors down when rho is searched, when scores are taken, and once to adapt.
    """
    searched = 1.0 / config.rho_every if config.rho_every else 0.0
    twice = searched + 1.0 / config.evaluate_every + bool(config.user_steps) / config.rounds
    return {
        "region down": 3.0 * wire,
        "region up": 1.0 * wire,
        "device down": (1.0 + 2.0 * twice) * wire,
        "device up": 1.0 * wire,
    }


def traffic_table(plans: Sequence[Plan]) -> list[str]:
    """Return the traffic of the default schedule as a Markdown table."""
    titles = list(traffic(0, Config()))
    lines = [
        f"| model | training | {' | '.join(titles)} |",
        "|---|---" + "|---:" * len(titles) + "|",
    ]
    for one in plans:
        cells = [in_bytes(round(value)) for value in traffic(one.wire, Config()).values()]
        lines.append(
            f"| {one.model} | {TRAINING[one.training]}, {one.precision} | {' | '.join(cells)} |"
        )
    return lines


def in_bytes(count: int) -> str:
    """Return a number of bytes for people."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def main() -> None:
    """Compute the tables, print them, and write the plans as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/memory_plan.json"))
    options = parser.parse_args()
    plans = [
        plan(family, size, training, precision)
        for family, size in MODELS
        for training, precision in (("full", "fp32"), ("lora", "bf16"))
    ]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(one) for one in plans], indent=1) + "\n"
    write_atomic(options.json, text.encode())
    print("\n".join([*table(plans), "", *traffic_table(plans)]))


if __name__ == "__main__":
    main()
