"""What the tests share: a tiny T5, a toy task of known gradients, regions of scripted devices."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from hypothesis import settings
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import (
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from client_app.datasets.dataset import Example
from client_app.datasets.spaces import Space
from client_app.models import byte_tokenizer
from client_app.task import Batch, Tensors
from client_app.tasks.image import SIDE, Image, as_source, network
from client_app.tasks.labels import LabelText, labels_of_all
from client_app.tasks.text_to_text import TextToText
from region_app.coordinator import Coordinator
from region_app.uplink import make_uplink
from regionfed.config import Config
from regionfed.contract import (
    AdaptReply,
    AdaptRequest,
    DeltaRequest,
    GradientReply,
    GradientRequest,
    LossReply,
    LossRequest,
    ProfileReply,
    ProfileRequest,
    RegionPersonalise,
    RegionTrain,
    ScoreReply,
    ScoreRequest,
    decode,
    encode,
)
from regionfed.personaliser import PERSONALISERS, Personaliser, Released
from regionfed.privacy.plan import plan_privacy
from regionfed.records import RoundRecord
from regionfed.vector import Layout, to_arrays
from server_app.in_process_grid import InProcessGrid, Node
from strategies.optimisers import Momentum
from strategies.regionfed import RegionFed, ServerState

# The same examples in every run, and no test fails for being slow.
settings.register_profile("regionfed", derandomize=True, deadline=None)
settings.load_profile("regionfed")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A test may configure logging as a deployed process does; the next finds it as it was."""
    yield
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if handler.name == "regionfed"]:
        root.removeHandler(handler)
        handler.close()
    for package in ("regionfed", "strategies", "client_app", "region_app", "server_app"):
        logging.getLogger(package).setLevel(logging.NOTSET)


# ------------------------------------------------------------------------------ a tiny T5
_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 :,.'-+/&%()"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single characters, some 60 of them; it ends texts as T5's does."""
    tokens = ["<pad>", "</s>", "<unk>", *_CHARACTERS, *(f"<extra_{i}>" for i in range(9))]
    model = WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def tiny_t5(seed: int = 0) -> T5ForConditionalGeneration:
    """Return a T5 of a few thousand random weights, with dropout in its configuration."""
    settings: dict[str, Any] = {"decoder_start_token_id": 0, "tie_word_embeddings": True}
    config = T5Config(
        vocab_size=len(tiny_tokenizer()),
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=2,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.1,
        **settings,
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return T5ForConditionalGeneration(config)


@pytest.fixture
def t5() -> TextToText:
    """The tiny T5 as a task."""
    return TextToText(tiny_t5(), tiny_tokenizer())


# ------------------------------------------------------------------ a tiny model of each family
SPACES = {
    "intent": Space("class", ("shoes", "grocery", "car")),
    "entities": Space("tags", ("other", "brand", "size", "unit")),
    "spelling": Space("text"),
}

QUERIES = [
    Example("intent", "red shoes", "shoes", "a"),
    Example("intent", "a b", "grocery", "b"),
    Example("entities", "20 l tank for car", "size unit other other other", "c"),
    Example("spelling", "umbrela", "umbrella", "d"),
    Example("spelling", "ea", "tea", "e"),
]


def tiny_roberta(seed: int = 0, spaces: dict[str, Space] | None = None) -> LabelText:
    """Return a RoBERTa of a few thousand random weights, of bytes, as a task."""
    spaces = spaces or SPACES
    labels = labels_of_all(spaces)
    tokenizer = byte_tokenizer()
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=66,
        num_labels=len(labels),
        pad_token_id=tokenizer.pad_token_id,
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = RobertaForTokenClassification(config)
        # Fresh weights of RoBERTa are so small that gradients drown in rounding.
        for parameter in module.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
        return LabelText(module, tokenizer, spaces, 64)


def tiny_images(n: int = 6, seed: int = 0) -> list[Example]:
    """Return random images with labels 0 to 2."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, SIDE, SIDE), dtype=np.uint8)
    return [Example("digit", as_source(i), str(k % 3), f"g{k}") for k, i in enumerate(images)]


def tiny_cnn(seed: int = 0) -> Image:
    """Return the LEAF network with few channels as a task."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = network((4, 4), 8, 3)
    return Image(module, "digit", Space("class", ("0", "1", "2")))


def t5_task(seed: int = 0) -> TextToText:
    """Return the tiny T5 as a task."""
    return TextToText(tiny_t5(seed), tiny_tokenizer())


FAMILIES: dict[str, tuple[Callable[[int], Any], list[Example]]] = {
    "t5": (t5_task, QUERIES),
    "roberta": (tiny_roberta, QUERIES),
    "cnn": (tiny_cnn, tiny_images()),
}
"""A task of each family by a seed, and examples for it."""


@pytest.fixture(scope="session")
def t5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as made by save_pretrained, for the setting `model`."""
    folder = tmp_path_factory.mktemp("tiny-t5")
    tiny_t5().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------ a toy task
Loss = Callable[[Tensors, torch.Tensor, torch.Tensor], torch.Tensor]


def squared_error(weights: Tensors, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Loss of linear regression, (B,)."""
    return (x @ weights["weight"].reshape(-1) + weights["bias"].reshape(()) - y) ** 2


def linear_loss(weights: Tensors, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Loss whose gradient in the weight is x itself, and 0 in the bias; (B,)."""
    return x @ weights["weight"].reshape(-1) + y + 0.0 * weights["bias"].reshape(())


class ToyTask:
    """A linear model on examples whose source is numbers ``"1.5 -2"`` and whose target is one."""

    def __init__(
        self, inputs: int, loss: Loss = squared_error, module: nn.Module | None = None
    ) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self._module = module or nn.Linear(inputs, 1)
        self._loss = loss

    @property
    def module(self) -> nn.Module:
        return self._module

    def encode(self, examples: Sequence[Example]) -> Batch:
        dtype = next(self._module.parameters()).dtype
        return {
            "x": torch.tensor([[float(v) for v in e.source.split()] for e in examples]).to(dtype),
            "y": torch.tensor([float(e.target) for e in examples]).to(dtype),
        }

    def losses(self, weights: Tensors, batch: Batch) -> torch.Tensor:
        return self._loss(weights, batch["x"], batch["y"])

    def scores(self, weights: Tensors, examples: Sequence[Example]) -> list[float]:
        losses = self.losses(weights, self.encode(examples))
        return [float(v) for v in torch.exp(-losses.float().abs())]


def toy_example(x: Iterable[float], y: float = 0.0, task: str = "toy") -> Example:
    """Return an example for `ToyTask`."""
    return Example(task, " ".join(str(float(v)) for v in x), str(float(y)), "group")


class Mixed(nn.Module):
    """A little of everything: ties, a frozen weight, a scalar, bf16, and integer buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.frozen = nn.Linear(3, 3, bias=False)
        self.frozen.weight.requires_grad = False
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.bf16 = nn.Linear(3, 2).to(torch.bfloat16)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.scale * self.frozen(self.embed(x))
        low: torch.Tensor = self.bf16(hidden.to(torch.bfloat16)).float()
        return torch.cat([self.head(hidden), low], -1)


# --------------------------------------------------------------------- a region of scripts
REGION = "North"
TASKS = ("toy",)
RUN_ID = 7


def tiny_config(**settings: Any) -> Config:
    """Return a validated configuration: few rounds, reproducible noise, no waiting."""
    values: dict[str, Any] = {
        "rounds": 4,
        "regions": 2,
        "clients_per_region": 2,
        "examples_per_client": 8,
        "workers": 1,
        "join_timeout": 0.0,
        "sketch_size": 8,
        "server_lr": 1.0,
        "trainable": "",
        "residual_step": 3.0,
        "noise_limit": 1e6,
        "sampling_rate": 0.5,
        "target_epsilon": 8.0,
        "noise_seed": 0,
        "evaluation_privacy": "panel",
        "user_steps": 0,
        **settings,
    }
    return Config.from_run_config({k.replace("_", "-"): v for k, v in values.items()})


class Forgetful(list[Any]):
    """A list that keeps nothing: for what a test would otherwise hold in memory."""

    def append(self, thing: Any) -> None:
        del thing


def part(content: RecordDict, name: str) -> Any:
    """Return a record of a message; its values are of types that only the test knows."""
    return content[name]


Answer = Callable[[Any], Any]


def _no_answer(request: Any) -> Any:
    raise AssertionError(f"nobody scripted an answer to {type(request).__name__}")


@dataclass
class Script:
    """What one fake device answers, and what it was asked.

    An answer is a function of the decoded request that returns a message of the contract, or
    records to send as they are, or raises.
    """

    gradient: Answer = _no_answer
    loss: Answer = _no_answer
    metrics: Answer = _no_answer
    profile: Answer = lambda _: ProfileReply(1000)
    adapt: Answer = lambda _: AdaptReply()
    asked: list[Any] = field(default_factory=list)

    def app(self) -> ClientApp:
        """Return a ClientApp that follows the script."""
        app = ClientApp()

        def answered(message: Message, request: Any, answer: Answer) -> Message:
            self.asked.append(request)
            content = answer(request)
            records = content if isinstance(content, RecordDict) else encode(content)
            return Message(records, reply_to=message)

        @app.train("gradient")
        def gradient(message: Message, context: Context) -> Message:
            request = decode(GradientRequest, message.content, {})
            return answered(message, request, self.gradient)

        @app.train("delta")
        def delta(message: Message, context: Context) -> Message:
            return answered(message, decode(DeltaRequest, message.content, {}), self.gradient)

        @app.train("adapt")
        def adapt(message: Message, context: Context) -> Message:
            return answered(message, decode(AdaptRequest, message.content, {}), self.adapt)

        @app.evaluate("loss")
        def loss(message: Message, context: Context) -> Message:
            return answered(message, decode(LossRequest, message.content, {}), self.loss)

        @app.evaluate("metrics")
        def metrics(message: Message, context: Context) -> Message:
            return answered(message, decode(ScoreRequest, message.content, {}), self.metrics)

        @app.query("profile")
        def profile(message: Message, context: Context) -> Message:
            return answered(message, decode(ProfileRequest, message.content, {}), self.profile)

        return app


def steady(total: torch.Tensor, loss_sum: float = 0.0, **answers: Answer) -> Script:
    """Return a device that always answers with these sums, and with zeros otherwise."""
    standard: dict[str, Any] = {
        "gradient": lambda r: GradientReply(total, torch.zeros(r.sketch_size), loss_sum),
        "loss": lambda r: LossReply([0.0] * len(r.steps)),
        "metrics": lambda _: ScoreReply([0.0] * (3 * len(TASKS))),
    }
    return Script(**{**standard, **answers})


def context_of(
    node_id: int, node_config: dict[str, Any] | None = None, config: Config | None = None
) -> Context:
    """Return a node's context."""
    return Context(
        run_id=RUN_ID,
        node_id=node_id,
        node_config=node_config or {},
        state=RecordDict(),
        run_config=dict(config.to_run_config()) if config else {},
    )


def scripted_grid(scripts: Sequence[Script]) -> InProcessGrid:
    """Return a grid of scripted devices, with node ids from 1."""
    nodes = {i: Node(script.app(), context_of(i)) for i, script in enumerate(scripts, 1)}
    return InProcessGrid(nodes, RUN_ID)


def coordinator_of(
    folder: Path,
    scripts: Sequence[Script],
    config: Config,
    *,
    personaliser: Personaliser | None = None,
    region: str = REGION,
    declared: int | None = None,
    labels: int = 0,
) -> Coordinator:
    """Return a region's coordinator over scripted devices, with the plan that a run would make."""
    person = personaliser or PERSONALISERS.load(config.personaliser)(config)
    return Coordinator(
        region=region,
        grid=scripted_grid(scripts),
        devices=len(scripts) if declared is None else declared,
        config=config,
        plan=plan_privacy(
            config,
            sketch=person.measures_conflict and config.conflict == "sketch",
            votes=person.searches_rho,
            anew=not person.accumulates,
            queries=person.queries,
            labels=labels if person.compares_labels else 0,
        ),
        personaliser=person,
        tasks=TASKS,
        folder=folder,
    )


def scripted_world(
    folder: Path, scripts: dict[str, list[Script]], config: Config, *, labels: int = 0
) -> tuple[InProcessGrid, dict[int, str]]:
    """Return a world of regions of scripted devices behind their uplinks, and their names."""
    names = dict(enumerate(scripts, 1))
    nodes = {
        i: Node(
            make_uplink(
                coordinator_of(folder / name, scripts[name], config, region=name, labels=labels)
            ),
            context_of(i),
        )
        for i, name in names.items()
    }
    return InProcessGrid(nodes, RUN_ID), names


@dataclass
class Run:
    """What came of a run: a record and a state per round."""

    records: list[RoundRecord] = field(default_factory=list)
    states: list[ServerState] = field(default_factory=list)

    def observe(self, record: RoundRecord, state: ServerState) -> None:
        """Keep what the Strategy tells of a round."""
        self.records.append(record)
        self.states.append(state)


def run_rounds(
    grid: Grid,
    names: dict[int, str],
    config: Config,
    theta: torch.Tensor,
    *,
    tasks: tuple[str, ...] = TASKS,
    layout: str = "layout",
    run: Run | None = None,
    labels: int = 0,
) -> Run:
    """Run all rounds of the Strategy on a grid of regions, by plain descent."""
    run = run or Run()
    strategy = RegionFed(
        config,
        Momentum(config.server_lr, 0.0),
        names,
        tasks,
        layout,
        sketch_size=config.sketch_size if config.conflict == "sketch" else 0,
        labels=labels,
        observers=[run.observe],
    )
    strategy.start(grid, ArrayRecord(to_arrays("theta", theta)), num_rounds=config.rounds)
    return run


def train_request(theta: torch.Tensor, round_: int = 1) -> RegionTrain:
    """Return the server's first message of a round."""
    return RegionTrain(round=round_, layout="layout", theta=theta)


def personalise_request(
    theta: torch.Tensor, global_update: torch.Tensor, round_: int = 1, **fields: Any
) -> RegionPersonalise:
    """Return the server's second message of a round."""
    request = RegionPersonalise(
        round=round_,
        layout="layout",
        median_conflict=0.0,
        conflict_spread=0.0,
        noise_floor=0.0,
        theta=theta,
        global_update=global_update,
        global_sketch=torch.zeros(8),
    )
    return replace(request, **fields)


def released(**facts: Any) -> Released:
    """Return what a personaliser may look at: zeros of two weights, except what is given."""
    zeros = dict.fromkeys(("update", "global_update", "theta", "previous"), torch.zeros(2))
    return Released(**{"round": 3, "noise_std": 0.0, **zeros, **facts})


def no_query(point: torch.Tensor, inner_step: float = 0.0) -> torch.Tensor:
    """Stand in for devices that must not be asked."""
    raise AssertionError("a gradient was asked for")


def toy_layout(inputs: int) -> Layout:
    """Return the layout of `ToyTask`'s model."""
    return Layout.of(nn.Linear(inputs, 1))


# ------------------------------------------------------------------------------ comparison
def brute_force(
    task: Any, layout: Layout, point: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients (B, p) and losses (B,) by one plain backward pass per example."""
    gradients, losses = [], []
    size = next(iter(batch.values())).shape[0]
    for i in range(size):
        weights = {n: t.detach().clone().requires_grad_() for n, t in layout.tensors(point).items()}
        loss = task.losses(weights, {k: v[i : i + 1] for k, v in batch.items()})[0]
        grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        named = {n: g for n, g in zip(weights, grads, strict=True) if g is not None}
        gradients.append(layout.flatten(named))
        losses.append(loss.detach())
    return torch.stack(gradients), torch.stack(losses)


def clipped(vectors: torch.Tensor, bound: float) -> torch.Tensor:
    """Return rows (B, n) scaled to a norm of at most `bound`, in double precision."""
    rows = vectors.double()
    norms = rows.norm(dim=1).tolist()
    scale = [min(1.0, bound / n) if n > 0.0 and math.isfinite(n) else 1.0 for n in norms]
    return rows * torch.tensor(scale, dtype=torch.float64)[:, None]
