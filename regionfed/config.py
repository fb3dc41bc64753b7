"""The whole configuration of a run: one place, with defaults, ranges and help.

Flower's run configuration is flat: ``flwr run . --run-config 'rounds=5 seed=1'``. Keys are
written with dashes there and with underscores here. `Config.from_run_config` validates once;
past it no code checks a setting again.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Any

from regionfed.errors import ConfigurationError
from regionfed.privacy.units import UNITS
from regionfed.registry import nearest

Value = bool | int | float | str

# A profile is a set of defaults. Flower hands over every key, so a setting that has the practical
# default cannot be told from one that nobody set: the profile replaces it.
PROFILES: dict[str, dict[str, Value]] = {
    "practical": {},
    "paper": {
        "rounds": 50,
        "server_lr": 1.0,
        "server_momentum": 0.0,
        "noise_limit": 1e6,
        "personaliser": "dynamic",
        "sign": "published",
        "personal_step": 1.0,
        "inner_step": 1.0,
        "conflict": "raw",
        "rho_search": "published",
        "rho_high": 1.0,
        "rho_evaluations": 7,
        "unit": "example-in-mean",
        "clip_norm": 1.0,
        "noise_multiplier": 4.0,
        "sampling_rate": 0.1,
        "user_steps": 0,
    },
}

# What concerns the machine alone that it is set on. All else has to be the same in the world and in
# its regions: how much noise is enough, for one, follows from it.
LOCAL = frozenset(
    {
        *("run_dir", "resume", "workers", "threads", "data_path", "model", "device"),
        *("microbatch", "gradient_checkpointing", "client_app", "tracking"),
        *("round_timeout", "device_timeout", "join_timeout", "min_regions", "max_failed_rounds"),
    }
)


# As a profile, for one public job each; the data lie where `data-path` says. Models start from
# random weights where no pretrained one is shipped, hence Adam and other steps.
_FROM_SCRATCH: dict[str, Value] = {
    "trainable": "",
    "server_optimiser": "adam",
    "server_lr": 3e-3,
    "residual_step": 3.0,
    "clip_norm": 1.0,
    "user_steps": 0,
}
BENCHMARKS: dict[str, dict[str, Value]] = {
    "": {},
    "esci": {"dataset": "esci"},
    "esci-roberta": {
        **_FROM_SCRATCH,
        "dataset": "esci",
        "task": "labels",
        "model": "roberta:tiny",
    },
    "reviews": {
        **_FROM_SCRATCH,
        "dataset": "reviews",
        "regions": 5,
        "task": "labels",
        "model": "roberta:tiny",
        "max_length": 64,
    },
    "femnist": {**_FROM_SCRATCH, "dataset": "femnist", "task": "image", "model": "cnn:small"},
    "unipen": {
        **_FROM_SCRATCH,
        "dataset": "unipen",
        "regions": 10,
        "task": "image",
        "model": "cnn:small",
    },
}


def setting(
    default: Value,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
    open_high: bool = False,
    choices: tuple[str, ...] = (),
) -> Any:
    """Declare one setting: its default, what it does, and the values it may take.

    Parameters
    ----------
    default : bool, int, float or str
        Default; it also fixes the type.
    help : str
        One line for a person.
    low, high : float, optional
        Bounds of a number, inclusive unless `open_low` or `open_high`.
    choices : tuple of str, optional
        The only values that a text may have.
    """
    metadata = {
        "help": help,
        "low": low,
        "high": high,
        "open_low": open_low,
        "open_high": open_high,
        "choices": choices,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """A validated configuration; see each field's ``help``."""

    # The run
    profile: str = setting(
        "practical",
        "'practical', or 'paper' (the published formulas and settings): a set of defaults; it "
        "replaces every setting that has its practical default, any other value stays",
        choices=tuple(PROFILES),
    )
    benchmark: str = setting(
        "",
        "a public job as a set of defaults, used as a profile's: 'esci', 'esci-roberta', "
        "'reviews', 'femnist', 'unipen'; '' = none",
        choices=tuple(BENCHMARKS),
    )
    seed: int = setting(0, "seed of data, sampling and initialisation (never of noise)", low=0)
    rounds: int = setting(25, "training rounds", low=1, high=100_000)
    run_dir: str = setting("runs", "folder of the runs; relative to the project")
    run_name: str = setting(
        "",
        "name of the run, the same in the world and in its regions; asking for a name again goes "
        "on with that run. Empty = a new one each time (simulation only)",
    )
    resume: str = setting("", "run folder to continue, or 'latest'; its settings are kept")
    tracking: str = setting(
        "",
        "where rounds are tracked besides the run's own files: 'prometheus', 'tensorboard', "
        "'mlflow', 'wandb', or 'package.module:Class'; several with commas between; '' = nowhere",
    )
    workers: int = setting(
        0, "simulation processes; 0 = one per core, at most one per region", low=0
    )
    threads: int = setting(1, "threads of PyTorch in each simulation process", low=1, high=1024)
    round_timeout: float = setting(
        600.0, "seconds a region has to answer", low=0.0, open_low=True, high=86_400.0
    )
    device_timeout: float = setting(
        120.0, "seconds a device has to answer its region", low=0.0, open_low=True, high=86_400.0
    )
    join_timeout: float = setting(
        120.0, "seconds to wait for the declared regions and devices", low=0.0, high=86_400.0
    )
    min_regions: int = setting(1, "regions that must answer for a round to count", low=1)
    max_failed_rounds: int = setting(
        3, "rounds in a row below min-regions before the run ends as failed", low=1
    )

    # Data and model
    dataset: str = setting(
        "retail",
        "'retail' (generated), 'esci', 'reviews', 'femnist', 'unipen', 'files' (your own), or "
        "'package.module:loader'",
    )
    data_path: str = setting(
        "",
        "folder or file of the dataset, for those read from disk; empty = what the environment "
        "variable REGIONFED_DATA says",
    )
    columns: str = setting(
        "",
        "dataset='files': which column holds what, as 'source=query target=label region=country'; "
        "also client, task and group",
    )
    regions: int = setting(8, "number of regions", low=1, high=10_000)
    clients_per_region: int = setting(10, "devices per region", low=1, high=1_000_000)
    examples_per_client: int = setting(600, "training examples per device", low=1)
    dirichlet_alpha: float = setting(
        0.3, "label skew over devices; small is skewed", low=0.0, open_low=True, high=1e6
    )
    task: str = setting(
        "text-to-text",
        "'text-to-text' (T5), 'labels' (RoBERTa), 'image' (CNN), or 'package.module:make_task'",
    )
    model: str = setting(
        "retail-t5",
        "'retail-t5' (shipped), a local Hugging Face folder, a name on the hub, or random weights "
        "as 't5:small', 'roberta:base', 'cnn:leaf'",
    )
    # Noise grows with what is trained. What a word means is stored early in the encoder and in
    # feed-forward layers (Geva et al. 2021): these learn most under noise.
    trainable: str = setting(
        "^(encoder.block.0|decoder.*DenseReluDense)",
        "regular expression of parameter names to train; empty = all",
    )
    lora_rank: int = setting(
        0, "rank of LoRA adapters on the linear layers in 'trainable'; 0 = train in full", low=0
    )
    precision: str = setting(
        "fp32", "numbers that the model computes with", choices=("fp32", "bf16", "fp16")
    )
    device: str = setting(
        "auto", "'auto' (CUDA where there is any)", choices=("auto", "cpu", "cuda")
    )
    max_length: int = setting(
        0,
        "tokens of a text that the model reads; 0 = the task's own (32, or 128 for labels)",
        low=0,
    )
    client_app: str = setting("client_app.app:app", "ClientApp that answers the contract")
    microbatch: int = setting(96, "examples per vectorised gradient pass", low=1)
    gradient_checkpointing: bool = setting(
        False,
        "compute the activations of a model's blocks again where gradients need them: less memory "
        "for more time",
    )

    # Learning
    server_optimiser: str = setting("momentum", "'momentum', 'adam', or 'package.module:Class'")
    server_lr: float = setting(10.0, "step of the global model", low=0.0, open_low=True, high=1e3)
    server_momentum: float = setting(
        0.5, "momentum of the server optimiser", low=0.0, high=1.0, open_high=True
    )
    averaging: float = setting(
        0.0,
        "decay of the average of past global models; 0 = off",
        low=0.0,
        high=1.0,
        open_high=True,
    )

    # A device's own steps, where the unit is the client
    client_steps: int = setting(8, "unit client: steps of a device in a round", low=1, high=10_000)
    client_lr: float = setting(
        1e-3, "unit client: size of a device's step", low=0.0, open_low=True, high=1e3
    )
    client_optimiser: str = setting(
        "adamw", "unit client: how a device steps", choices=("adamw", "sgd")
    )

    # Personalisation
    personaliser: str = setting(
        "residual",
        "'residual', 'grad', 'interp', 'meta', 'dynamic', 'none', or 'package.module:Class'",
    )
    residual_step: float = setting(24.0, "step of the accumulated residual", low=0.0, high=1e4)
    sign: str = setting(
        "descent",
        "way that grad and meta go: 'descent', or 'published' (up the loss)",
        choices=("descent", "published"),
    )
    personal_step: float = setting(
        16.0, "step of grad and meta, and of each local step of interp", low=0.0, high=1e4
    )
    local_steps: int = setting(2, "local steps of interp, a noised gradient each", low=1, high=100)
    inner_step: float = setting(
        10.0, "how far meta looks ahead: eta in grad L(theta - eta g)", low=0.0, high=1e4
    )
    meta_order: int = setting(
        1,
        "1 = meta ahead along the global gradient; 2 = through each example's own step",
        low=1,
        high=2,
    )
    conflict_threshold: float = setting(
        1.0, "dynamic: conflict that calls for meta, over round 1's median", low=0.0, high=1e6
    )
    divergence_threshold: float = setting(
        0.1, "dynamic: KL divergence (nats) of labels that calls for meta", low=0.0, high=1e3
    )
    size_threshold: float = setting(
        1.5, "dynamic: size that calls for interp, over the mean region's", low=0.0, high=1e6
    )
    conflict: str = setting(
        "sketch", "what measures conflict", choices=("sketch", "debiased", "raw")
    )
    sketch_size: int = setting(256, "dimensions of the conflict sketch", low=1, high=65_536)
    alpha_min: float = setting(0.5, "least personalisation weight", low=0.0, high=1.0)
    alpha_gain: float = setting(
        1.0, "slope of the sigmoid, per spread of round-1 conflicts", low=0.0, high=1e3
    )
    rho_search: str = setting(
        "warm",
        "'warm' (around the last rho, rho = 0 a candidate), or 'published' (all of 0 to rho-high "
        "each time, without 0)",
        choices=("warm", "published"),
    )
    rho_high: float = setting(2.0, "upper end of the search for rho", low=0.0, high=1e3)
    rho_evaluations: int = setting(4, "golden-section evaluations per search", low=2, high=8)
    rho_every: int = setting(12, "rounds between searches for rho; 0 = never, rho stays 1", low=0)

    # User level
    user_steps: int = setting(
        16,
        "AdamW steps of each user's own part, after the last round; 0 = none",
        low=0,
        high=10_000,
    )
    user_lr: float = setting(
        2e-3, "step of AdamW for the user's own part", low=0.0, open_low=True, high=1.0
    )
    user_scores: str = setting(
        "device",
        "who sees scores of users' own models: 'device' alone, or 'panel' (all; its members "
        "consent, for no noise covers the training examples that such a score depends on)",
        choices=("device", "panel"),
    )

    # Privacy
    privacy_mode: str = setting(
        "dp", "'dp', or 'none' (no noise at all; the report says so)", choices=("dp", "none")
    )
    unit: str = setting(
        "example",
        "what one unit of privacy is: an 'example', a 'client' (a device with all it has), a "
        "'region'; 'example-on-schedule' (no secret sampling, noise correlated over rounds), or "
        "'example-in-mean' (as published: the region's mean is clipped)",
        choices=tuple(UNITS),
    )
    target_epsilon: float = setting(
        4.0, "epsilon that the whole run may reach", low=0.0, open_low=True, high=1e3
    )
    noise_multiplier: float = setting(
        0.0,
        "noise (std) over clip-norm; 0 = planned from target-epsilon, else epsilon follows from it",
        low=0.0,
        high=1e4,
    )
    delta: float = setting(
        1e-5, "delta of the guarantee", low=0.0, open_low=True, high=1.0, open_high=True
    )
    sampling_rate: float = setting(
        0.15,
        "chance of each example (unit client: of each device) to be in a round",
        low=0.0,
        open_low=True,
        high=1.0,
    )
    clip_norm: float = setting(
        0.5, "L2 bound C of what is clipped", low=0.0, open_low=True, high=1e6
    )
    auxiliary_noise_ratio: float = setting(
        4.0,
        "noise multiplier of sketch, loss and votes, over that of the update",
        low=0.0,
        open_low=True,
        high=1e3,
    )
    size_noise_multiplier: float = setting(
        20.0, "noise multiplier of a region's size, released once", low=0.0, open_low=True, high=1e6
    )
    noise_seed: int = setting(
        -1, "-1 = secure noise; 0 or more = reproducible, FOR TESTS ONLY, voids privacy", low=-1
    )

    secure_aggregation: str = setting(
        "off",
        "'off', or 'pairwise': devices mask and noise what they send, so that the coordinator "
        "learns noised sums alone",
        choices=("off", "pairwise"),
    )
    tolerated_dropouts: float = setting(
        0.3,
        "secure aggregation: fraction of a region's devices that may vanish during an exchange",
        low=0.0,
        high=0.5,
        open_high=True,
    )
    tolerated_colluders: float = setting(
        0.1,
        "secure aggregation: fraction of devices that may tell the coordinator all they know",
        low=0.0,
        high=1.0,
        open_high=True,
    )

    noise_limit: float = setting(
        0.06,
        "most noise (std) that the steps may put on a weight, before alpha and rho scale it",
        low=0.0,
        open_low=True,
        high=1e6,
    )

    # Evaluation
    held_out: str = setting(
        "test",
        "'test', or 'validation': training examples kept out, on which to choose settings",
        choices=("test", "validation"),
    )
    evaluate_every: int = setting(5, "rounds between evaluations; the last is always one", low=1)
    evaluation_privacy: str = setting(
        "noised",
        "'noised' (charged), 'panel' (held-out examples of a consenting panel), or 'off'",
        choices=("noised", "panel", "off"),
    )
    evaluation_epsilon: float = setting(
        4.0, "epsilon for held-out examples, when noised", low=0.0, open_low=True, high=1e3
    )

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, object]) -> "Config":
        """Validate a flat run configuration; keys that are absent take their default.

        The profile is laid over the settings that have their practical default.

        Raises
        ------
        ConfigurationError
            Naming the key, what was found, what is allowed, and for an unknown key the
            nearest known one.
        """
        known = {key_of(f): f for f in fields(cls)}
        run_config = _with_new_names(run_config)
        for key in run_config:
            if key not in known:
                raise ConfigurationError(f"unknown setting '{key}'{nearest(key, list(known))}")
        values: dict[str, Any] = {
            known[k].name: _validated(k, known[k], v) for k, v in run_config.items()
        }
        defaults = {f.name: f.default for f in fields(cls)}
        preset = {
            **BENCHMARKS[values.get("benchmark", cls.benchmark)],
            **PROFILES[values.get("profile", cls.profile)],
        }
        for name, value in preset.items():
            if values.get(name, defaults[name]) == defaults[name]:
                values[name] = value
        config = cls(**values)
        config._check_combinations()
        return config

    def disagreements(self, other: "Config") -> list[str]:
        """Return, as ``key: ours, theirs``, what two ends of a run must share and do not."""
        return [
            f"{key_of(f)}: {getattr(self, f.name)!r}, {getattr(other, f.name)!r}"
            for f in fields(self)
            if f.name not in LOCAL and getattr(self, f.name) != getattr(other, f.name)
        ]

    def _check_combinations(self) -> None:
        if self.run_name and not _is_folder_name(self.run_name):
            raise ConfigurationError(
                f"run-name='{self.run_name}' cannot name a folder: use letters, digits, '-', '_' "
                f"and '.', the first a letter or digit, 64 at most."
            )
        if self.precision == "fp16":
            raise ConfigurationError(
                "precision='fp16': activations of T5 go beyond its largest number, 65504, and "
                "gradients of single examples below its smallest. Set 'bf16' or 'fp32'."
            )
        if self.min_regions > self.regions:
            raise ConfigurationError(
                f"min-regions={self.min_regions} exceeds regions={self.regions}; lower it."
            )
        unit = UNITS[self.unit]
        if self.conflict == "sketch" and not unit.sketches:
            raise ConfigurationError(
                f"unit='{self.unit}' bounds no example, so that no sketch can be released: "
                f"set conflict='raw' or 'debiased'."
            )
        if self.conflict == "debiased" and unit.sampling(self.sampling_rate).period:
            raise ConfigurationError(
                f"unit='{self.unit}' has noise that is another each round, which conflict="
                f"'debiased' does not know: set conflict='sketch' or 'raw'."
            )
        if self.noise_multiplier > 0.0 and self.target_epsilon != type(self).target_epsilon:
            raise ConfigurationError(
                f"noise-multiplier={self.noise_multiplier:g} sets the noise, so that "
                f"target-epsilon={self.target_epsilon:g} cannot: give one of them (profile='paper' "
                f"sets the multiplier)."
            )
        if self.user_steps and not unit.weighs_users:
            # A user's clipped gradients are comparable with a mean of such, and nothing else.
            raise ConfigurationError(
                f"unit='{self.unit}' leaves nothing to weigh a user's model against: "
                f"set user-steps=0."
            )
        if unit.as_one and self.meta_order == 2:
            raise ConfigurationError(
                f"meta-order=2 goes through each example's own step, which unit='{self.unit}' does "
                f"not take: set meta-order=1."
            )
        if self.secure_aggregation != "off" and not unit.hides_sums:
            raise ConfigurationError(
                f"unit='{self.unit}' has the coordinator draw devices or clip a mean, which it "
                f"cannot under secure-aggregation='{self.secure_aggregation}': set "
                f"unit='example', or secure-aggregation='off'."
            )
        if 2.0 * self.tolerated_dropouts + self.tolerated_colluders >= 1.0:
            raise ConfigurationError(
                f"tolerated-dropouts={self.tolerated_dropouts:g} and "
                f"tolerated-colluders={self.tolerated_colluders:g}: twice the former plus the "
                f"latter must be less than 1, or two sets of survivors could both be a majority."
            )
        if self.privacy_mode == "none" and self.evaluation_privacy == "noised":
            # Without privacy nothing is noised; say it in the record rather than pretend.
            object.__setattr__(self, "evaluation_privacy", "panel")
        if self.user_scores == "panel" and self.evaluation_privacy != "panel":
            # The noise on scores covers held-out examples. A user's model is made of training
            # examples without noise, and one of them may change every score of that user.
            raise ConfigurationError(
                f"user-scores='panel' needs evaluation-privacy='panel', found "
                f"'{self.evaluation_privacy}': the noise on scores would not cover the training "
                f"examples that a user's model is made of. Set both, or leave user-scores='device'."
            )

    def to_run_config(self) -> dict[str, Value]:
        """Return the flat run configuration: `from_run_config` of it gives an equal object."""
        names = {f.name: key_of(f) for f in fields(self)}
        return {names[name]: value for name, value in asdict(self).items()}


# Settings of earlier versions, so that their runs can still be resumed.
_RENAMED: Mapping[tuple[str, object], Mapping[str, object]] = {
    ("clipping", "example"): {},
    ("clipping", "region-mean"): {"unit": "example-in-mean"},
}


def _with_new_names(run_config: Mapping[str, object]) -> dict[str, object]:
    found = dict(run_config)
    for key, value in run_config.items():
        if isinstance(value, str) and (key, value) in _RENAMED:
            del found[key]
            found |= _RENAMED[key, value]
    return found


def _is_folder_name(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text) is not None


def key_of(setting_field: "Field[Any]") -> str:
    """Return the key that a person writes for a field: dashes for underscores."""
    return setting_field.name.replace("_", "-")


def _validated(key: str, declared: "Field[Any]", value: object) -> Value:
    if declared.default is MISSING:  # pragma: no cover - every setting has a default
        raise ConfigurationError(f"setting '{key}' has no default")
    kind = type(declared.default)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ConfigurationError(
            f"{key}={value!r}: expected {kind.__name__}, got {type(value).__name__}."
        )
    rule = declared.metadata
    if isinstance(value, str) and rule["choices"] and value not in rule["choices"]:
        raise ConfigurationError(
            f"{key}='{value}'{nearest(value, list(rule['choices']))} "
            f"Allowed: {', '.join(rule['choices'])}."
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_range(key, value, rule)
    return value  # type: ignore[return-value] # its type was compared with the default's


def _check_range(key: str, value: float, rule: Mapping[str, Any]) -> None:
    low, high = rule["low"], rule["high"]
    # nan passes `value < low`, so finiteness is asked first; -0.0 would pass an open bound at 0.
    good = math.isfinite(value)
    if good and low is not None:
        good = value > low if rule["open_low"] else value >= low
    if good and high is not None:
        good = value < high if rule["open_high"] else value <= high
    if not good:
        left = "(" if rule["open_low"] or low is None else "["
        right = ")" if rule["open_high"] or high is None else "]"
        bounds = f"{left}{'-inf' if low is None else low:g}" if low is not None else "(-inf"
        bounds += f", {high:g}{right}" if high is not None else ", inf)"
        raise ConfigurationError(f"{key}={value!r}: must be a finite number in {bounds}.")
