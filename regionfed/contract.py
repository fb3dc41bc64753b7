"""Every message that crosses a tier: its name, direction, fields and dtypes, validated both ways.

A message is a frozen dataclass. Its fields say what crosses, and nothing else can:

* tensors travel as float32 vectors in an ArrayRecord, in chunks;
* numbers that were computed travel in a MetricRecord, everything else in a ConfigRecord.

`encode` refuses to build a message that breaks the contract, `decode` refuses to read one:
exact keys, types, lengths, finite values. The receiver states the lengths it expects.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from regionfed.errors import ContractError
from regionfed.vector import from_arrays, integers_from_arrays, integers_to_arrays, to_arrays

VERSION = 2

M = TypeVar("M")


@dataclass(frozen=True)
class Length:
    """Names the dimension of a vector or list, so that a receiver can state what it expects."""

    name: str


@dataclass(frozen=True)
class Computed:
    """Marks a number that was computed: it travels in the MetricRecord."""


Model = Annotated[torch.Tensor, Length("p")]
Sketch = Annotated[torch.Tensor, Length("k")]
Number = Annotated[float, Computed()]
Count = Annotated[int, Computed()]
Scores = Annotated[list[float], Computed(), Length("columns*tasks")]
Histogram = Annotated[list[float], Computed(), Length("labels")]
Differences = Annotated[list[float], Computed(), Length("steps")]


# ---------------------------------------------------------------------------- server <-> region
@dataclass(frozen=True)
class RegionQuery:
    """Server to region: say which region you are, and whether you can begin."""

    NAME: ClassVar[str] = "query"


@dataclass(frozen=True)
class RegionName:
    """Region to server: this one, and its devices have joined. An error says what it waits for."""

    region: str


@dataclass(frozen=True)
class RegionTrain:
    """Server to region: give me your noised update at this model."""

    NAME: ClassVar[str] = "train"

    round: int
    layout: str
    theta: Model


@dataclass(frozen=True)
class RegionUpdate:
    """Region to server: one noised update. The only thing a region ever says of its data.

    `update`, `sketch` and `loss` are one joint release of one Poisson sample, already divided by
    the expected batch. `examples` and `histogram` (of labels; empty where nothing needs it) were
    one joint release, noised, when the run began; or the former is what was declared. The noise
    levels and `epsilon` (-1 where privacy is off) depend on no data. How many devices answered, or
    were refused, is not told.
    (An error that ends a region's round may say how many of its declared devices have joined.)
    """

    region: str
    update: Model
    sketch: Sketch
    loss: Number
    examples: Number
    update_noise_std: Number
    sketch_noise_std: Number
    epsilon: Number
    histogram: Histogram = field(default_factory=list)


@dataclass(frozen=True)
class RegionPersonalise:
    """Server to region: personalise against this noised global update, then evaluate.

    `mean_examples` and `global_histogram` are the mean and the sum of what regions released.
    """

    NAME: ClassVar[str] = "evaluate"

    round: int
    layout: str
    median_conflict: float
    conflict_spread: float
    noise_floor: float
    theta: Model
    global_update: Model
    global_sketch: Sketch
    mean_examples: float = 0.0
    global_histogram: Annotated[list[float], Length("labels")] = field(default_factory=list)


@dataclass(frozen=True)
class RegionScores:
    """Region to server: what its personalisation came to, and noised scores if permitted.

    Scores are released as sums over held-out examples: per task (count, global, personalised), and
    the user's as a fourth where a panel consented to that.
    The counts say what the searches for rho have cost so far: points that a device evaluated,
    messages that all devices were sent; they depend on no data.
    """

    region: str
    strategy: str
    reason: str
    scored: bool
    conflict: Number
    alpha: Number
    rho: Number
    epsilon: Number
    scores: Scores
    rho_evaluations: Count = 0
    rho_messages: Count = 0


# --------------------------------------------------------------------- coordinator <-> device
@dataclass(frozen=True)
class GradientRequest:
    """Coordinator to device: the sum of clipped per-example gradients of a Poisson sample.

    `query` numbers the gradients of a round, each of a sample of its own: 0 is the round's
    update, the others are a personaliser's. With ``inner_step`` eta > 0 the gradient is that of
    ``L_i(w - eta grad L_i(w))``, differentiated through the step. With a ``period`` above 0 the
    sample is not drawn: it is those whose turn it is in that many rounds.
    """

    NAME: ClassVar[str] = "train.gradient"

    round: int
    layout: str
    sampling_rate: float
    clip_norm: float
    loss_cap: float
    sketch_seed: int
    sketch_size: int
    point: Model
    query: int = 0
    inner_step: float = 0.0
    period: int = 0


@dataclass(frozen=True)
class DeltaRequest:
    """Coordinator to device: what K steps on all your examples change, clipped as a whole.

    Only devices that were drawn are asked. `optimiser` is ``"adamw"`` or ``"sgd"``.
    """

    NAME: ClassVar[str] = "train.delta"

    round: int
    layout: str
    clip_norm: float
    loss_cap: float
    sketch_seed: int
    sketch_size: int
    steps: int
    learning_rate: float
    optimiser: str
    point: Model
    query: int = 0


@dataclass(frozen=True)
class GradientReply:
    """Device to coordinator; never leaves the region.

    `total` is the sum over the sample of gradients clipped to C, `sketch` the sum of their
    sketches clipped to C, `loss` the sum of losses clipped to the cap.

    To a `DeltaRequest`: start minus end of the steps, clipped to C (it points uphill, like a
    gradient), its sketch clipped to C, and the mean loss at the start, clipped to the cap.
    """

    total: Model
    sketch: Sketch
    loss: Number


@dataclass(frozen=True)
class AdaptRequest:
    """Coordinator to device: make your user's own part, on this model of your region.

    `update` is the region's noised gradient, as it was released, with `update_noise_std` on each
    coordinate: the device measures by it how far its user is from the region.
    """

    NAME: ClassVar[str] = "train.adapt"

    round: int
    layout: str
    steps: int
    learning_rate: float
    clip_norm: float
    alpha_min: float
    alpha_gain: float
    update_noise_std: float
    personalised: Model
    update: Model


@dataclass(frozen=True)
class AdaptReply:
    """Device to coordinator: done. What was made stays on the device, and nothing tells of it."""


@dataclass(frozen=True)
class LossRequest:
    """Coordinator to device: losses along a line, for the search of rho.

    The points are ``base + t * direction`` for each t in `steps`; the reply is relative to t = 0.
    It is the sum over the sample, or with `as_one` the mean, clipped as a whole.
    """

    NAME: ClassVar[str] = "evaluate.loss"

    round: int
    layout: str
    sampling_rate: float
    clip_norm: float
    steps: list[float]
    base: Model
    direction: Model
    as_one: bool = False
    period: int = 0


@dataclass(frozen=True)
class LossReply:
    """Device to coordinator: summed loss differences, each example's clipped to an L2 norm.

    With `as_one` their mean over the device's examples, clipped to that norm.
    """

    differences: Differences


@dataclass(frozen=True)
class ScoreRequest:
    """Coordinator to device: score these two models on the held-out examples.

    With `with_user` the user's own model too; a device refuses that unless its own settings say
    that it is of a panel that consented. With `as_one` the reply is the mean over the
    device's held-out examples.
    """

    NAME: ClassVar[str] = "evaluate.metrics"

    round: int
    layout: str
    with_user: bool
    theta: Model
    personalised: Model
    as_one: bool = False


@dataclass(frozen=True)
class ScoreReply:
    """Device to coordinator: per task (count, sum of global scores, sum of personalised).

    A fourth column, the sum of the user's own scores, only where the request says `with_user`.
    """

    scores: Scores


@dataclass(frozen=True)
class ProfileRequest:
    """Coordinator to device: say how many examples you hold, and of which labels if asked.

    The device counts for `most` examples at most, in all its labels together too; 0 is no bound.
    """

    NAME: ClassVar[str] = "query.profile"

    layout: str
    labels: int = 0
    most: int = 0


@dataclass(frozen=True)
class ProfileReply:
    """Device to coordinator; only the noised sums over devices are ever used.

    An example counts once in `examples` and at most once in `histogram`, which is empty unless
    the request names the number of labels.
    """

    examples: Count
    histogram: Histogram = field(default_factory=list)


EXCHANGES: tuple[tuple[str, type, type], ...] = (
    ("server -> region", RegionQuery, RegionName),
    ("server -> region", RegionTrain, RegionUpdate),
    ("server -> region", RegionPersonalise, RegionScores),
    ("region -> device", GradientRequest, GradientReply),
    ("region -> device", DeltaRequest, GradientReply),
    ("region -> device", AdaptRequest, AdaptReply),
    ("region -> device", LossRequest, LossReply),
    ("region -> device", ScoreRequest, ScoreReply),
    ("region -> device", ProfileRequest, ProfileReply),
)


def message_type(request: object) -> str:
    """Return the Flower message type that a request travels under."""
    return str(type(request).NAME)  # type: ignore[attr-defined] # every request has one


# ------------------------------------------------------------------------------------ numbers
def numbers(message: object) -> dict[str, torch.Tensor]:
    """Return what a reply counts, by field, as float32 vectors; a single number has length 1."""
    out = {}
    for declared in _declared(type(message)):
        value = getattr(message, declared.name)
        if not declared.is_vector:
            value = torch.tensor(value if isinstance(value, list) else [value], dtype=torch.float32)
        out[declared.name] = value
    return out


def lengths_of(kind: type, lengths: Mapping[str, int]) -> dict[str, int]:
    """Return how many numbers each field of a reply has, from the length of each dimension."""
    return {d.name: lengths[d.length] if d.length else 1 for d in _declared(kind)}


# ------------------------------------------------------------------------------------- codec
def encode(message: object) -> RecordDict:
    """Return the records of a message.

    Raises
    ------
    ContractError
        If a value has not its declared type or is not finite.
    """
    return next(encode_each([message]))


def encode_each(messages: Iterable[object]) -> Iterator[RecordDict]:
    """Yield the records of messages; a vector that several of them have is made into bytes once.

    Raises
    ------
    ContractError
        As `encode`.
    """
    # With each vector itself: as long as it is kept, no other has its id.
    known: dict[tuple[str, int], tuple[object, dict[str, Array]]] = {}
    for message in messages:
        arrays = ArrayRecord()
        config: dict[str, Any] = {"contract.version": VERSION}
        metrics: dict[str, Any] = {}
        for declared in _declared(type(message)):
            value = getattr(message, declared.name)
            if declared.is_array:
                one = declared.name, id(value)
                if one not in known:
                    known[one] = value, _arrays(declared, value)
                for key, array in known[one][1].items():
                    arrays[key] = array
            else:
                target = metrics if declared.is_computed else config
                target[declared.name] = _checked(declared, declared.type, _plain(declared, value))
        records: dict[str, Any] = {"config": ConfigRecord(config)}
        if len(arrays):
            records["arrays"] = arrays
        if metrics:
            records["metrics"] = MetricRecord(metrics)
        yield RecordDict(records)


def _arrays(declared: "_Declared", value: Any) -> dict[str, Array]:
    if declared.is_ring:
        return integers_to_arrays(declared.name, value)
    if value.ndim != 1 or not bool(torch.isfinite(value).all()):
        raise ContractError(f"{declared.path}: must be a finite vector.")
    return to_arrays(declared.name, value)


def decode(kind: type[M], records: RecordDict, lengths: Mapping[str, int]) -> M:
    """Read a message of `kind`, or refuse it.

    Parameters
    ----------
    kind : type
        The dataclass that is expected.
    records : RecordDict
        What came.
    lengths : Mapping[str, int]
        Expected length of each dimension, e.g. ``{"p": 230400, "k": 256}``; a dimension that
        is not named may have any.

    Raises
    ------
    ContractError
        Naming the field, what was expected and what was found.
    """
    fields_of = _declared(kind)
    arrays = _record(kind, records, "arrays", ArrayRecord, any(f.is_array for f in fields_of))
    metrics = _record(kind, records, "metrics", MetricRecord, any(f.is_computed for f in fields_of))
    config = dict(_record(kind, records, "config", ConfigRecord, True))
    if extra := set(records) - {"arrays", "metrics", "config"}:
        raise ContractError(f"{kind.__name__}: unknown records {sorted(extra)}.")
    version = config.pop("contract.version", None)
    if version != VERSION:
        raise ContractError(f"{kind.__name__}: contract version {version}, this end has {VERSION}.")
    vectors = {key.rpartition("/")[0] for key in arrays}
    _same_keys(kind, "arrays", vectors, {f.name for f in fields_of if f.is_array})
    _same_keys(kind, "metrics", set(metrics), {f.name for f in fields_of if f.is_computed})
    _same_keys(
        kind,
        "config",
        set(config),
        {f.name for f in fields_of if not f.is_array and not f.is_computed},
    )
    values: dict[str, Any] = {}
    for declared in fields_of:
        length = lengths.get(declared.length)
        if declared.is_array:
            read = from_arrays if declared.is_vector else integers_from_arrays
            try:
                values[declared.name] = read(declared.name, arrays, length)
            except ContractError as error:
                raise ContractError(f"{kind.__name__}: {error}") from error
            continue
        source = metrics if declared.is_computed else config
        value = _checked(declared, declared.type, source[declared.name])
        if isinstance(value, list) and length is not None and len(value) != length:
            raise ContractError(f"{declared.path}: expected {length} numbers, got {len(value)}.")
        values[declared.name] = value
    return kind(**values)


@dataclass(frozen=True)
class _Declared:
    """One field of a message, as its annotation declares it."""

    path: str
    name: str
    type: Any
    length: str
    is_computed: bool

    @property
    def is_vector(self) -> bool:
        return self.type is torch.Tensor

    @property
    def is_ring(self) -> bool:
        return self.type is np.ndarray

    @property
    def is_array(self) -> bool:
        return self.is_vector or self.is_ring


_DECLARED: dict[type, tuple[_Declared, ...]] = {}


def _declared(kind: type) -> tuple[_Declared, ...]:
    if kind not in _DECLARED:
        _DECLARED[kind] = _read_declaration(kind)
    return _DECLARED[kind]


def _read_declaration(kind: type) -> tuple[_Declared, ...]:
    hints = get_type_hints(kind, include_extras=True)
    out = []
    for one in fields(kind):
        hint = hints[one.name]
        marks = getattr(hint, "__metadata__", ())
        out.append(
            _Declared(
                path=f"{kind.__name__}.{one.name}",
                name=one.name,
                type=get_args(hint)[0] if marks else hint,
                length=next((m.name for m in marks if isinstance(m, Length)), ""),
                is_computed=any(isinstance(m, Computed) for m in marks),
            )
        )
    return tuple(out)


def _record(kind: type, records: RecordDict, name: str, of: type[Any], wanted: bool) -> Any:
    """Return a record of the right kind; an empty one where the message has none."""
    if (name in records) != wanted:
        what = "lacks" if wanted else "must not have"
        raise ContractError(f"{kind.__name__}: {what} record '{name}'.")
    record = records[name] if wanted else of()
    if type(record) is not of:
        raise ContractError(f"{kind.__name__}: record '{name}' is not a {of.__name__}.")
    return record


def _same_keys(kind: type, where: str, found: set[str], expected: set[str]) -> None:
    if found != expected:
        missing, extra = sorted(expected - found), sorted(found - expected)
        raise ContractError(f"{kind.__name__}: {where} lacks {missing} and has unknown {extra}.")


def _plain(declared: _Declared, value: object) -> object:
    """Coerce numpy and torch scalars, which Flower's records refuse; the only place that does."""
    if isinstance(value, (list, tuple)):
        return [_plain(declared, v) for v in value]
    try:
        return value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError) as error:
        raise ContractError(f"{declared.path}: expected one number ({error}).") from error


def _checked(declared: _Declared, hint: Any, value: Any) -> Any:
    """Return `value` if it has the type `hint` and is finite; an int may stand for a float."""
    if get_origin(hint) is list:
        if not isinstance(value, list):
            raise ContractError(f"{declared.path}: expected a list, got {type(value).__name__}.")
        return [_checked(declared, get_args(hint)[0], v) for v in value]
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:
        raise ContractError(
            f"{declared.path}: expected {hint.__name__}, got {type(value).__name__}."
        )
    if hint is float and not math.isfinite(value):
        raise ContractError(f"{declared.path}: {value} is not finite.")
    return value
