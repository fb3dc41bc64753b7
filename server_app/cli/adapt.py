"""``regionfed adapt``: a user's own model from a local file; nothing leaves the machine."""

import math
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from client_app.adapt import RegionModel as StartModel
from client_app.adapt import Settings, adapt_user
from client_app.datasets.dataset import ClientData, Example
from client_app.datasets.local_file import keep_apart, read_examples
from client_app.task import Task
from client_app.user import FACTS, UserModel, fingerprint, save_facts, save_user
from regionfed.config import Config
from regionfed.randomness import derive_seed
from regionfed.records import with_mean
from regionfed.vector import Layout
from server_app.cli.command import Command
from server_app.cli.export import refuse_to_overwrite
from server_app.cli.numbers import within
from server_app.cli.options import add_model_options, chosen_model
from server_app.result import RegionModel
from server_app.wording import number, percent, points

KEPT = 0.2
_DEFAULT = Config()
MODELS = ("global", "personalised", "user")


@dataclass(frozen=True)
class Verdict:
    """Whether a user's model is better on the kept examples.

    Attributes
    ----------
    gain : float
        Mean of the paired differences, user's score less the region's.
    error : float or None
        Standard error of that; None for one example.
    """

    gain: float
    error: float | None

    @property
    def text(self) -> str:
        """One sentence; a difference within two standard errors is none."""
        if self.error is None or abs(self.gain) <= 2.0 * self.error:
            return "no clear difference: the kept examples are too few to tell, or it is too small"
        return "it helps" if self.gain > 0.0 else "it hurts: better use the region's model"


@dataclass(frozen=True)
class Judgement:
    """Mean scores by model and task, and what they say of the user's model."""

    scores: Mapping[str, Mapping[str, float | None]]
    verdict: Verdict


def configure(parser: ArgumentParser) -> None:
    """Add the options."""
    add_model_options(parser, region_needed=True)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="jsonl or csv with the columns task, source, target",
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--force", action="store_true", help="replace a user's model in it")
    parser.add_argument(
        "--steps",
        type=within(int, 1, 10_000),
        help=f"AdamW steps (default: the run's user-steps, or {_DEFAULT.user_steps})",
    )
    parser.add_argument(
        "--lr", type=within(float, 1e-9, 1.0), help="step of AdamW (default: the run's user-lr)"
    )
    parser.add_argument(
        "--keep",
        type=within(float, 0.01, 0.9),
        default=KEPT,
        help="share of the queries that are not learned from but judged by (default %(default)s)",
    )


def run(options: Namespace) -> int:
    """Make the model, judge it, write it, and say all of that."""
    out: Path = options.out.expanduser().absolute()
    refuse_to_overwrite(out, options.force)
    result, model = chosen_model(options)
    config = result.config
    data = keep_apart(read_examples(options.data, result.tasks), options.keep)
    steps = options.steps or config.user_steps or _DEFAULT.user_steps
    settings = settings_of(config, steps=steps, learning_rate=options.lr or config.user_lr)
    task, layout = result.load_task()
    user = make_user(model, task, layout, data, settings)
    own = user.on(model.point)
    points_ = zip(MODELS, (result.theta, model.point, own), strict=True)
    judged = judge(task, layout, dict(points_), data.test)
    save_user(out, user)
    save_facts(
        out,
        {
            "run": result.folder.path.name,
            "region": user.region,
            "alpha": user.own.alpha,
            "conflict": user.own.conflict,
            "learned_from": len(data.train),
            "judged_by": len(data.test),
            "scores": judged.scores,
            "gain": judged.verdict.gain,
            "standard_error": judged.verdict.error,
            "verdict": judged.verdict.text,
            "settings": asdict(settings),
        },
    )
    sys.stdout.write("".join(f"{line}\n" for line in told(user, judged, data, out)))
    return 0


def settings_of(config: Config, *, steps: int, learning_rate: float) -> Settings:
    """Return how a run's devices would adapt, with these steps."""
    return Settings(
        steps=steps,
        learning_rate=learning_rate,
        clip_norm=config.clip_norm,
        alpha_min=config.alpha_min,
        alpha_gain=config.alpha_gain,
        microbatch=config.microbatch,
        seed=derive_seed(config.seed, "adapt"),
    )


def make_user(
    model: RegionModel, task: Task, layout: Layout, data: ClientData, settings: Settings
) -> UserModel:
    """Make the user's own part from the training side of the data."""
    update, noise_std = model.update()
    start = StartModel(model.point, update, noise_std)
    own = adapt_user(task, layout, start, data.train, settings)
    return UserModel(own, model.name, layout.fingerprint, fingerprint(model.point))


def judge(
    task: Task, layout: Layout, models: Mapping[str, torch.Tensor], examples: Sequence[Example]
) -> Judgement:
    """Score the models of `MODELS`, each (p,), on examples that none of them learned from."""
    scores = {name: task.scores(layout.tensors(point), examples) for name, point in models.items()}
    return Judgement(
        {name: _by_task(examples, values) for name, values in scores.items()},
        verdict_of(scores["user"], scores["personalised"]),
    )


def verdict_of(user: Sequence[float], region: Sequence[float]) -> Verdict:
    """Compare two models on the same examples, at least one."""
    differences = [a - b for a, b in zip(user, region, strict=True)]
    error = None
    if len(differences) > 1:
        error = statistics.stdev(differences) / math.sqrt(len(differences))
    return Verdict(statistics.fmean(differences), error)


def told(user: UserModel, judged: Judgement, data: ClientData, out: Path) -> list[str]:
    """Return what came of it, in lines for a person."""
    lines = [
        f"user of {user.region}: learned from {len(data.train)} examples, "
        f"alpha_u {number(user.own.alpha)}",
        f"{'task':<12}{'global %':>10}{'region %':>10}{'user %':>10}{'points':>8}",
    ]
    for task in judged.scores["user"]:
        global_, region, own = (judged.scores[name][task] for name in MODELS)
        cells = f"{percent(global_):>10}{percent(region):>10}{percent(own):>10}"
        lines.append(f"{task:<12}{cells}{points(region, own):>8}")
    return [
        *lines,
        f"on {len(data.test)} examples that were kept apart: {judged.verdict.text}",
        f"model          {out}",
        f"facts          {out / FACTS}",
    ]


def _by_task(examples: Sequence[Example], scores: Sequence[float]) -> dict[str, float | None]:
    by_task: dict[str, list[float]] = {}
    for example, score in zip(examples, scores, strict=True):
        by_task.setdefault(example.task, []).append(score)
    return with_mean({task: statistics.fmean(values) for task, values in by_task.items()})


COMMAND = Command(
    "Make a user's own model from a local file. It is\n"
    "theta + alpha_r theta_r + alpha_u theta_u_local; the last part is made here, stays in the\n"
    "folder that you name, and is of use with this run's model of the region alone. A part of\n"
    "the file is kept apart, to say whether it helps.\n\n"
    "  regionfed adapt --run runs/latest --region UK --data my.jsonl --out me\n"
    '  regionfed predict --run runs/latest --region UK --user me "red trainrs size 9"',
    configure,
    run,
)
