"""Everything that crosses a tier, field by field: under which noise, or why it needs none.

One table for the auditor, for the documentation and for the test that fails when a field is added
to the contract and forgotten here.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from regionfed import contract
from regionfed.secure_aggregation import messages as secure_messages


@dataclass(frozen=True)
class Release:
    """One part of a noised release, as the ledger names it in `sensitivity`.

    Attributes
    ----------
    what : str
        What it says of the data.
    to : str
        The first who is told, beyond the coordinator that holds the sum.
    reaches : str
        Who learns it, or what is made of it, in the end.
    bound : str
        Why one unit changes it by no more than its sensitivity.
    """

    what: str
    to: str
    reaches: str
    bound: str


RELEASES: Mapping[str, Release] = {
    "update": Release(
        "gradient of the region's loss",
        "server",
        "all regions (the mean), the region's devices",
        "clipped to C: each example's gradient, a device's whole change, or the region's mean",
    ),
    "sketch": Release(
        "the same gradient in few dimensions",
        "server",
        "all regions (the mean)",
        "each example's, device's or region's sketch is clipped to C",
    ),
    "loss": Release(
        "loss at the start of the round",
        "server",
        "report",
        "each example's, or a device's or region's mean, is cut to [0, 8]",
    ),
    "vote": Release(
        "losses along the line of rho",
        "coordinator's choice of rho",
        "server (rho), the region's devices (theta_r)",
        "each example's vector of differences, or a device's or region's mean, is clipped to 1",
    ),
    "gradient": Release(
        "gradient that a personaliser asks for",
        "coordinator's theta_r",
        "the region's devices (theta_r), server (rho)",
        "as the update",
    ),
    "size": Release(
        "number of training examples",
        "server",
        "all regions (the mean), report",
        "each counts 1; a device counts for those that are declared at most; never of a region",
    ),
    "labels": Release(
        "histogram of labels",
        "server",
        "all regions (the sum), the reason of a route",
        "each counts once at most; a device as in its size; never of a region",
    ),
    "scores": Release(
        "sums of held-out scores, with their count",
        "server",
        "report",
        "a count and two scores in [0, 1], of an example, or a device's or region's mean: sqrt(3)",
    ),
}
"""By part. Every release leaves the coordinator of its region, which has summed and noised it."""


@dataclass(frozen=True)
class Field:
    """How one field of a message is treated.

    Attributes
    ----------
    part : str
        The part of a release that it is, or that it becomes before it leaves the region; "".
    reason : str
        Why nothing is charged for it here; "" where it is the release itself.
    """

    part: str = ""
    reason: str = ""

    @property
    def depends_on_data(self) -> bool:
        """Whether some example may change it at all."""
        return self.reason != PUBLIC


PUBLIC = "public: the configuration, the schedule or the model's layout; no example changes it"
_PUBLIC = Field(reason=PUBLIC)


def _released(part: str) -> Field:
    return Field(part=part)


def _inside(part: str) -> Field:
    return Field(part, "stays in the region: the coordinator sums, charges and noises it first")


def _made_of(*parts: str) -> Field:
    return Field(reason=f"made of what was released ({', '.join(parts)}): no further cost")


_RANDOM = Field(reason="keys and shares of keys, drawn at random for one exchange")
_PRESENT = Field(reason="who is still there; membership and presence are not secret")

_MODEL = ("update", "sketch", "size")
_OWN = ("update", "sketch", "vote", "gradient", "size", "labels")

INVENTORY: Mapping[str, Mapping[str, Field]] = {
    "RegionQuery": {},
    "RegionName": {"region": _PUBLIC},
    "RegionTrain": {"round": _PUBLIC, "layout": _PUBLIC, "theta": _made_of("update")},
    "RegionUpdate": {
        "region": _PUBLIC,
        "update": _released("update"),
        "sketch": _released("sketch"),
        "loss": _released("loss"),
        "examples": _released("size"),
        "update_noise_std": _made_of("size"),
        "sketch_noise_std": _made_of("size"),
        "epsilon": Field(reason="counted from noise and sampling; it tells of retries, not data"),
        "histogram": _released("labels"),
    },
    "RegionPersonalise": {
        "round": _PUBLIC,
        "layout": _PUBLIC,
        "median_conflict": _made_of(*_MODEL),
        "conflict_spread": _made_of(*_MODEL),
        "noise_floor": _made_of("size"),
        "theta": _made_of("update"),
        "global_update": _made_of("update"),
        "global_sketch": _made_of("sketch"),
        "mean_examples": _made_of("size"),
        "global_histogram": _made_of("labels"),
    },
    "RegionScores": {
        "region": _PUBLIC,
        "strategy": _made_of(*_OWN),
        "reason": _made_of(*_OWN),
        "scored": _PUBLIC,
        "conflict": _made_of(*_MODEL),
        "alpha": _made_of(*_MODEL),
        "rho": _made_of(*_OWN),
        "epsilon": Field(reason="counted from noise and sampling; it tells of retries, not data"),
        "scores": _released("scores"),
        "rho_evaluations": _PUBLIC,
        "rho_messages": Field(
            reason="searches times devices that are declared: no example is told"
        ),
    },
    "GradientRequest": {
        **dict.fromkeys(
            (
                "round",
                "layout",
                "sampling_rate",
                "clip_norm",
                "loss_cap",
                "sketch_seed",
                "sketch_size",
                "period",
            ),
            _PUBLIC,
        ),
        "point": _made_of(*_OWN),
        "query": Field(reason="number of the question; how many depends on released values only"),
        "inner_step": _made_of(*_OWN),
    },
    "DeltaRequest": {
        **dict.fromkeys(
            (
                "round",
                "layout",
                "clip_norm",
                "loss_cap",
                "sketch_seed",
                "sketch_size",
                "steps",
                "learning_rate",
                "optimiser",
            ),
            _PUBLIC,
        ),
        "point": _made_of(*_OWN),
        "query": Field(reason="number of the question; how many depends on released values only"),
    },
    "GradientReply": {
        "total": _inside("update"),
        "sketch": _inside("sketch"),
        "loss": _inside("loss"),
    },
    "AdaptRequest": {
        **dict.fromkeys(
            ("round", "layout", "steps", "learning_rate", "clip_norm", "alpha_min", "alpha_gain"),
            _PUBLIC,
        ),
        "update_noise_std": _made_of("size"),
        "personalised": _made_of(*_OWN),
        "update": _made_of("update"),
    },
    "AdaptReply": {},
    "LossRequest": {
        **dict.fromkeys(
            ("round", "layout", "sampling_rate", "clip_norm", "as_one", "period"), _PUBLIC
        ),
        "steps": _made_of(*_OWN),
        "base": _made_of("update"),
        "direction": _made_of(*_OWN),
    },
    "LossReply": {"differences": _inside("vote")},
    "ScoreRequest": {
        **dict.fromkeys(("round", "layout", "with_user", "as_one"), _PUBLIC),
        "theta": _made_of("update"),
        "personalised": _made_of(*_OWN),
    },
    "ScoreReply": {"scores": _inside("scores")},
    "ProfileRequest": {"layout": _PUBLIC, "labels": _PUBLIC, "most": _PUBLIC},
    "ProfileReply": {"examples": _inside("size"), "histogram": _inside("labels")},
    "AdvertiseRequest": {"terms": _PUBLIC},
    "AdvertiseReply": {"advert": _RANDOM},
    "ShareRequest": {"adverts": _RANDOM},
    "ShareReply": {"receivers": _PRESENT, "sealed": _RANDOM},
    "MaskRequest": {"senders": _PRESENT, "sealed": _RANDOM},
    "MaskReply": {
        "masked": Field(
            reason="a noised reply under masks that nobody can take off alone: the sum over "
            "devices is what is released"
        )
    },
    "AgreeRequest": {"survivors": _PRESENT},
    "AgreeReply": {"signature": _PRESENT},
    "UnmaskRequest": {"signers": _PRESENT, "signatures": _PRESENT},
    "UnmaskReply": {"shares": _RANDOM},
}
"""By message and field. `GradientReply.total` becomes ``gradient`` where a personaliser asked."""


def messages() -> dict[str, type]:
    """Return every message of the contract by its name, in the order of the exchanges."""
    return {kind.__name__: kind for _, ask, answer in _exchanges() for kind in (ask, answer)}


def _exchanges() -> tuple[tuple[str, type, type], ...]:
    return (*contract.EXCHANGES, *secure_messages.EXCHANGES)


def undeclared() -> list[str]:
    """Return what contract and inventory do not agree on: forgotten fields, stale entries."""
    crossing = {
        f"{name}.{one.name}"
        for name, kind in messages().items()
        for one in dataclasses.fields(kind)
    }
    known = {f"{name}.{field}" for name, entry in INVENTORY.items() for field in entry}
    known_parts = {field.part for entry in INVENTORY.values() for field in entry.values()} - {""}
    silent = {
        f"{name}.{field}: neither part nor reason"
        for name, entry in INVENTORY.items()
        for field, how in entry.items()
        if not how.part and not how.reason
    }
    return sorted((crossing ^ known) | (known_parts - set(RELEASES)) | silent)


def recipients(parts: Mapping[str, object]) -> str:
    """Return who is told of a release first, from its parts; "unknown" for an unknown one."""
    told = [RELEASES[part].to if part in RELEASES else "unknown" for part in parts]
    return ", ".join(dict.fromkeys(told))


def releases_table() -> str:
    """Return the releases as a table in Markdown."""
    rows = [
        f"| `{name}` | {r.what} | {r.to} | {r.reaches} | {r.bound} |"
        for name, r in RELEASES.items()
    ]
    head = "| part | what it tells of | told first | reaches | what bounds a unit |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def fields_table() -> str:
    """Return every field that crosses a tier as a table in Markdown, alike fields together."""
    rows = []
    for direction, ask, answer in _exchanges():
        for kind, way in ((ask, direction), (answer, " -> ".join(direction.split(" -> ")[::-1]))):
            alike: dict[Field, list[str]] = {}
            for name, field in INVENTORY[kind.__name__].items():
                alike.setdefault(field, []).append(f"`{name}`")
            rows += [
                f"| `{kind.__name__}`, {way} | {', '.join(names)} | {_words(field)} |"
                for field, names in alike.items()
            ] or [f"| `{kind.__name__}`, {way} | – | holds nothing |"]
    return "\n".join(["| message | fields | treatment |", "|---|---|---|", *rows])


def _words(field: Field) -> str:
    part = f"`{field.part}`" if field.part else ""
    return "; ".join(filter(None, (f"released as {part}" if part else "", field.reason)))
