"""How much memory and traffic a deployment takes, from a model's shape alone.

    python -m scripts.sizing [--microbatch 8] [--rank 8]

Prints the tables of docs/deployment.md. Traffic is what the contract puts on a link, four bytes a
trained weight. Memory counts weights and the vectors that a process holds at once; activations, and
what Python and PyTorch take by themselves, come on top.
"""

import argparse
from dataclasses import dataclass

from regionfed.config import Config

BYTES = 4  # of a float32


@dataclass(frozen=True)
class T5:
    """The shape of a T5 of the first version; Raffel et al. (2020), table 3."""

    d_model: int
    d_ff: int
    layers: int
    heads: int
    d_kv: int
    vocabulary: int = 32_128
    buckets: int = 32

    @property
    def weights(self) -> int:
        """Number of weights; embedding and output share theirs."""
        d = self.d_model
        attention = 4 * d * self.heads * self.d_kv
        feed_forward = 2 * d * self.d_ff
        encoder = self.layers * (attention + feed_forward + 2 * d)
        decoder = self.layers * (2 * attention + feed_forward + 3 * d)
        positions = 2 * self.buckets * self.heads
        return self.vocabulary * d + encoder + decoder + positions + 2 * d

    def adapters(self, rank: int) -> int:
        """Weights of low-rank adapters (Hu et al. 2021) of q and v, in all three attentions."""
        return 3 * self.layers * 2 * rank * (self.d_model + self.heads * self.d_kv)


@dataclass(frozen=True)
class Roberta:
    """The shape of RoBERTa with its head for masked words; Liu et al. (2019)."""

    d: int = 768
    d_ff: int = 3_072
    layers: int = 12
    vocabulary: int = 50_265
    positions: int = 514

    @property
    def weights(self) -> int:
        """Number of weights; embedding and output share theirs."""
        d, norm = self.d, 2 * self.d
        dense = d * d + d
        layer = 4 * dense + norm + (d * self.d_ff + self.d_ff) + (self.d_ff * d + d) + norm
        embeddings = (self.vocabulary + self.positions + 1) * d + norm
        return embeddings + self.layers * layer + dense + norm + self.vocabulary


@dataclass(frozen=True)
class Model:
    """A model's size: all of its weights, and those that are trained."""

    name: str
    weights: int
    trained: int


def models(rank: int) -> list[Model]:
    """Return the three models of the tables."""
    small, roberta, large = T5(512, 2048, 6, 8, 64), Roberta(), T5(1024, 16_384, 24, 32, 128)
    adapted = large.adapters(rank)
    return [
        Model("T5-small", small.weights, small.weights),
        Model("RoBERTa-base", roberta.weights, roberta.weights),
        Model(f"T5-3B, LoRA {rank} on q and v", large.weights + adapted, adapted),
    ]


def traffic(model: Model, config: Config) -> dict[str, float]:
    """Return bytes a round on a link: the mean over the rounds of a run.

    Region: theta down, the update up; then theta and the mean update down. Device: a point down,
    the sum up; two vectors down when rho is searched, when scores are taken, and once to adapt.
    """
    vector = BYTES * model.trained
    searched = 1.0 / config.rho_every if config.rho_every else 0.0
    twice = searched + 1.0 / config.evaluate_every + bool(config.user_steps) / config.rounds
    return {
        "region down": 3.0 * vector,
        "region up": 1.0 * vector,
        "device down": (1.0 + 2.0 * twice) * vector,
        "device up": 1.0 * vector,
    }


def memory(model: Model, microbatch: int) -> dict[str, float]:
    """Return bytes of weights and vectors that a process holds at once.

    Device: the model, the point, the sum, and a gradient per example of a microbatch. Coordinator:
    request, direction, point, sum, noise, reply, and both messages' bytes. Uplink: both messages,
    as records and as bytes. World: model, theta, average, momentum, mean, and two vectors a region.
    """
    vector = float(BYTES * model.trained)
    weights = float(BYTES * model.weights)
    return {
        "device": weights + (2 + microbatch) * vector,
        "coordinator": 8 * vector,
        "uplink": 4 * vector,
        "world, 8 regions": weights + (4 + 2 * 8) * vector,
    }


def table(rows: dict[str, dict[str, float]]) -> str:
    """Return rows as a table in Markdown, in megabytes."""
    titles = list(next(iter(rows.values())))
    lines = [f"| MB | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name, values in rows.items():
        lines.append(f"| {name} | {' | '.join(f'{v / 1e6:,.0f}' for v in values.values())} |")
    return "\n".join(lines)


def tables(microbatch: int, rank: int) -> str:
    """Return what the documentation shows."""
    known = models(rank)
    sizes = "\n".join(f"| {m.name} | {m.weights:,} | {m.trained:,} |" for m in known)
    return (
        f"| model | weights | trained |\n|---|---|---|\n{sizes}\n\n"
        f"Traffic a round on each link, with the default schedule:\n\n"
        f"{table({m.name: traffic(m, Config()) for m in known})}\n\n"
        f"Memory of each process, with `microbatch={microbatch}`:\n\n"
        f"{table({m.name: memory(m, microbatch) for m in known})}"
    )


def main() -> None:
    """Read the command line and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--microbatch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    given = parser.parse_args()
    print(tables(given.microbatch, given.rank))


if __name__ == "__main__":
    main()
