"""How much memory and traffic a deployment takes, from a model's shapes alone.

    python -m scripts.sizing [--microbatch 8] [--rank 8]

Prints the tables of docs/deployment.md. Nothing is loaded: shapes are those of the published
configurations, on PyTorch's meta device. Traffic is what the contract puts on a link, four bytes
a trained weight. Memory counts weights and the vectors that a process holds at once; activations,
and what Python and PyTorch take by themselves, come on top.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from regionfed.config import Config
from regionfed.vector import Layout

BYTES = 4  # of a float32


@dataclass(frozen=True)
class Model:
    """A model's size: all of its weights, and those that are trained."""

    name: str
    weights: int
    trained: int


def t5(d_model: int, d_ff: int, layers: int, heads: int, d_kv: int) -> nn.Module:
    """Return a T5 of the first version, without memory."""
    config = T5Config(
        vocab_size=32_128,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=layers,
        num_heads=heads,
        d_kv=d_kv,
        tie_word_embeddings=True,
    )
    return T5ForConditionalGeneration(config)


def roberta() -> nn.Module:
    """Return RoBERTa-base."""
    return RobertaForMaskedLM(
        RobertaConfig(vocab_size=50_265, max_position_embeddings=514, type_vocab_size=1)
    )


def size_of(name: str, build: Callable[[], nn.Module], rank: int = 0) -> Model:
    """Return a model's size; with a rank, low-rank adapters of q and v are what is trained."""
    with torch.device("meta"):
        module = build()
    weights = Layout.of(module).size
    if not rank:
        return Model(name, weights, weights)
    adapted = [
        layer
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and path.rpartition(".")[2] in {"q", "v"}
    ]
    trained = sum(rank * (layer.in_features + layer.out_features) for layer in adapted)
    return Model(f"{name}, LoRA {rank} on q and v", weights + trained, trained)


def traffic(model: Model, config: Config) -> dict[str, float]:
    """Return bytes a round on a link: the mean over the rounds of a run.

    Region: theta down, the update up; then theta and the mean update down. Device: a point down,
    the sum up; two vectors down when rho is searched, when scores are taken, and once to adapt.
    """
    vector = BYTES * model.trained
    often = 1.0 / config.rho_every if config.rho_every else 0.0
    now_and_then = often + 1.0 / config.evaluate_every + bool(config.user_steps) / config.rounds
    return {
        "region down": 3 * vector,
        "region up": vector,
        "device down": vector * (1 + 2 * now_and_then),
        "device up": vector,
    }


def memory(model: Model, microbatch: int) -> dict[str, float]:
    """Return bytes of weights and vectors that a process holds at once.

    Device: the model, the point, the sum, and a gradient per example of a microbatch. Coordinator:
    request, direction, point, sum, noise, and a reply with its bytes. Server: theta, average,
    momentum, mean, and per region an update.
    """
    vector = BYTES * model.trained
    return {
        "device": BYTES * model.weights + vector * (2 + microbatch),
        "coordinator": 8 * vector,
        "uplink": 4 * vector,
        "world, 8 regions": BYTES * model.weights + vector * (4 + 2 * 8),
    }


def table(rows: list[tuple[str, dict[str, float]]]) -> str:
    """Return rows as a table in Markdown, in megabytes."""
    titles = list(rows[0][1])
    lines = [f"| MB | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name, values in rows:
        lines.append(f"| {name} | {' | '.join(f'{v / 1e6:,.1f}' for v in values.values())} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--microbatch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    given = parser.parse_args()
    models = [
        size_of("T5-small", lambda: t5(512, 2048, 6, 8, 64)),
        size_of("RoBERTa-base", roberta),
        size_of("T5-3B", lambda: t5(1024, 16_384, 24, 32, 128), given.rank),
    ]
    for model in models:
        print(f"{model.name}: {model.weights:,} weights, {model.trained:,} trained")
    print(
        f"\nTraffic a round, default schedule:\n\n"
        f"{table([(m.name, traffic(m, Config())) for m in models])}"
    )
    print(
        f"\nMemory, microbatch={given.microbatch}:\n\n"
        f"{table([(m.name, memory(m, given.microbatch)) for m in models])}"
    )


if __name__ == "__main__":
    main()
