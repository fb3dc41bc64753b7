"""What a model costs each tier, in bytes: on the wire, on a device, in a region, at the server.

    python -m benchmarks.memory_plan --json benchmarks/results/memory_plan.json

Nothing is run: models are built at their true shapes on PyTorch's meta device, adapters put in by
peft, and what is trained is counted as `regionfed.vector.Layout` counts it. LoRA is of the
attention's q and v.

* wire: the vector that crosses, 4 bytes a number, and the chunks that it is cut into;
* device: weights in their precision, once in the module and once as those of the request where they
  are trained; the sum, the point and the gradients of a microbatch. Activations are not counted;
* region and server: as many vectors of that length as each holds at once (`REGION`, `SERVER`).
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from client_app.models import FAMILIES, add_lora, select_trainable
from regionfed.durable import write_atomic
from regionfed.vector import CHUNK, Layout

LORA_TARGETS = {
    "t5": r"Attention\.(q|v)\.weight$",
    "roberta": r"attention\.self\.(query|value)\.weight$",
}
RANK = 16
MICROBATCH = 8
BYTES = {"fp32": 4, "bf16": 2}
# Counted in region_app/coordinator.py: theta, theta_r, the point, the sum, one reply, the release.
REGION = 6
# Counted in strategies/regionfed.py: theta, its average, momentum, the mean, one update, the next.
SERVER = 6
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
    region: int
    server: int


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
        device=held + 2 * 4 * trained,
        region=REGION * 4 * trained,
        server=SERVER * 4 * trained,
    )


def table(plans: list[Plan]) -> list[str]:
    """Return the plans as a Markdown table."""
    lines = [
        "| model | training | precision | parameters | trained | on the wire | chunks "
        f"| device (microbatch {MICROBATCH}) | region | server |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in plans:
        sizes = [one.device, one.region, one.server]
        cells = " | ".join(map(in_bytes, sizes))
        lines.append(
            f"| {one.model} | {one.training} | {one.precision} | {one.parameters / 1e6:,.1f} M "
            f"| {one.trained / 1e6:,.2f} M | {in_bytes(one.wire)} | {one.chunks} | {cells} |"
        )
    return lines


def in_bytes(count: int) -> str:
    """Return a number of bytes for people."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def main() -> None:
    """Compute the table, print it, and write it as JSON."""
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
    print("\n".join(table(plans)))


if __name__ == "__main__":
    main()
