"""Queries of a retail search box in eight regions, for three text-to-text tasks.

* ``intent``: a query and the department it belongs to.
* ``spelling``: a mistyped query and what was meant, in the spelling of the region.
* ``entities``: a query and the type of each of its words.

A query is either *neutral* (its target is the same wherever it is asked) or *regional*: it
holds one form of the lexicon for which another region has another answer. The words around
a regional form are drawn alike in every region, so that only the region tells.

Every stream of queries has its own random generator, named by seed, region, device and side
of the split: nothing depends on what was generated before or on global state.
"""

import itertools
import math
import string
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from random import Random
from typing import Generic, NamedTuple, TypeVar

from client_app.datasets.dataset import Example
from client_app.datasets.retail.lexicon import (
    BRANDS,
    CONTEXT,
    FAMILIES,
    FORMS,
    INTENTS,
    LOCAL,
    MATERIALS,
    NEUTRAL_WORDS,
    NOUNS,
    REGIONAL_WORDS,
    Family,
)
from client_app.datasets.validation import is_validation

T = TypeVar("T")

TASKS = ("intent", "spelling", "entities")

REGIONAL_SHARE = 0.5
"""Share of the queries, in each task, whose right answer depends on the region.

No public study gives it. One half is the midpoint at which neither kind of query dominates: one
model for all regions can be right everywhere on the neutral half, and on the other only where the
region agrees with the majority. It was set before anything was tuned; it is a choice, not an
estimate, and it is never moved to reach a number.
"""

TEST_SHARE = 0.2
"""Share of the kinds of query that are kept for testing."""

LOCAL_SHARE = 0.15
"""Share of the neutral queries whose product goes by a name of the region only ("nappy", "windel").
The answer is the same everywhere, but few regions ever ask."""

CONTEXT_SIZES = (1, 1, 1, 1, 1, 2, 2, 2, 2, 3)
"""Number of words around the head of a query, one entry a tenth."""

Word = tuple[str, str]
"""A word and its entity type; a regional form has the type ``""``."""


class Query(NamedTuple):
    """What is asked, before a region answers it.

    Attributes
    ----------
    task, source : str
        As in `Example`.
    words : tuple of Word
        The words that are meant; a spelling family stands by its key.
    intent : str
        The intent of a neutral query.
    regional : str
        The regional form or spelling family in `words`, or ``""``.
    """

    task: str
    source: str
    words: tuple[Word, ...]
    intent: str
    regional: str


@dataclass(frozen=True)
class Ceiling:
    """Accuracy of the best classifier that is not told the region (1 with the region told).

    Attributes
    ----------
    regional : float
        On regional queries.
    overall : float
        On all queries.
    """

    regional: float
    overall: float


class _Zipf(Generic[T]):
    """Items whose frequency falls with their rank (by Zipf and Mandelbrot: 1 / (rank + 1))."""

    def __init__(self, items: Sequence[T], weights: Sequence[float] | None = None) -> None:
        self.items = tuple(items)
        rated = enumerate(weights or [1.0] * len(items))
        self._upto = tuple(itertools.accumulate(weight / (rank + 2) for rank, weight in rated))

    def draw(self, rng: Random) -> T:
        """Draw one item."""
        return self.items[bisect(self._upto, rng.random() * self._upto[-1])]


def answer(query: Query, region: str) -> str | None:
    """Give the right target of `query` in `region`; None where its form is not in use."""
    if query.task == "spelling":
        return " ".join(
            FAMILIES[word].spelling[region] if word == query.regional else word
            for word, _ in query.words
        )
    if not query.regional:
        types = " ".join(kind for _, kind in query.words)
        return query.intent if query.task == "intent" else types
    sense = FORMS[query.regional].get(region)
    if sense is None:
        return None
    if query.task == "intent":
        return sense.intent
    return " ".join(kind or sense.type for _, kind in query.words)


def group(query: Query) -> str:
    """Name the kind of a query: its words in any order, without sizes."""
    return " ".join(sorted(word for word, kind in query.words if kind != "size"))


def is_test(kind: str) -> bool:
    """Say on which side of the split a kind of query lies, the same for every device and seed.

    That the seed has no part in it keeps the test kinds out of the public examples too, from
    which the embedded model is pretrained.
    """
    return blake2b(kind.encode(), digest_size=4).digest() < _TEST_BELOW


_TEST_BELOW = int(TEST_SHARE * 2**32).to_bytes(4, "big")


def label_shares(rng: Random, concentration: float) -> tuple[float, ...]:
    """Draw the shares of the intents on one device from a symmetric Dirichlet.

    A Gamma(a) variate is Gamma(a + 1) * U^(1/a). In logarithms this stays finite where all
    variates would underflow to zero (a around 0.001).
    """
    logs = [
        math.log(rng.gammavariate(concentration + 1, 1))
        + math.log(1 - rng.random()) / concentration
        for _ in INTENTS
    ]
    peak = max(logs)
    weights = [math.exp(value - peak) for value in logs]
    return tuple(weight / sum(weights) for weight in weights)


def labels(rng: Random, shares: Sequence[float], size: int) -> list[str]:
    """Draw the intents of `size` queries; each intent has one in a hundred at the least."""
    drawn = list(INTENTS) * min(size // len(INTENTS), max(1, size // 100))
    drawn += rng.choices(INTENTS, shares, k=size - len(drawn))
    rng.shuffle(drawn)
    return drawn


def client_queries(
    seed: int, region: str, client: int, concentration: float, size: int, *, test: bool
) -> Iterator[Query]:
    """Yield `size` queries of one device for one side of the split, the tasks in turn."""
    name = f"retail/{seed}/{region}/{client}"
    shares = label_shares(Random(f"{name}/labels"), concentration)
    rng = Random(f"{name}/{'test' if test else 'train'}")
    for task, intent in zip(itertools.cycle(TASKS), labels(rng, shares, size), strict=False):
        yield _on_side(rng, task, intent, region, test)


def client_examples(
    seed: int, region: str, client: int, concentration: float, size: int, *, test: bool
) -> tuple[Example, ...]:
    """Generate the examples of one device for one side of the split."""
    return tuple(
        _example(query, region)
        for query in client_queries(seed, region, client, concentration, size, test=test)
    )


def public_examples(seed: int, size: int, *, test: bool = False) -> tuple[Example, ...]:
    """Generate region-neutral examples, for pretraining (or, of the test kinds, to judge it).

    No regional form, no spelling family and no local name occurs in them, and no kind of query that
    devices keep for validation.
    """
    rng = Random(f"retail/{seed}/public/{'test' if test else 'train'}")
    tasks = itertools.islice(itertools.cycle(TASKS), size)
    queries = (_on_side(rng, task, pick(rng, INTENTS), "", test) for task in tasks)
    return tuple(_example(query, "") for query in queries)


def region_blind_ceiling(queries: dict[str, Sequence[Query]]) -> dict[str, Ceiling]:
    """Return, by task, the best accuracy that is possible without being told the region.

    Given its form, a query is equally likely in every region that uses the form; so the Bayes
    classifier answers a form as most of its occurrences in `queries` do, and is right on those.
    It is taken to be perfect in everything else. An entity query counts as a whole.

    Parameters
    ----------
    queries : dict of str to sequence of Query
        Queries by region, as `client_queries` yields them.
    """
    answers: Counter[tuple[str, str, str]] = Counter()
    total: Counter[str] = Counter()
    regional: Counter[str] = Counter()
    for region, asked in queries.items():
        for query in asked:
            total[query.task] += 1
            if query.regional:
                regional[query.task] += 1
                answers[query.task, query.regional, _form_answer(query, region)] += 1
    best: dict[tuple[str, str], int] = {}
    for (task, form, _), count in answers.items():
        best[task, form] = max(best.get((task, form), 0), count)
    right = Counter[str]()
    for (task, _), count in best.items():
        right[task] += count
    return {
        task: Ceiling(
            right[task] / max(regional[task], 1),
            1 - (regional[task] - right[task]) / max(total[task], 1),
        )
        for task in TASKS
    }


def _form_answer(query: Query, region: str) -> str:
    """Return the part of the answer that depends on the region."""
    if query.task == "spelling":
        return FAMILIES[query.regional].spelling[region]
    sense = FORMS[query.regional][region]
    return (sense.intent or "") if query.task == "intent" else sense.type


def _example(query: Query, region: str) -> Example:
    """Let a region answer a query that it asked."""
    return Example(query.task, query.source, answer(query, region) or "", group(query))


def _on_side(rng: Random, task: str, intent: str, region: str, test: bool) -> Query:
    """Draw queries until one is on the wanted side; a public query has the region ``""``."""
    regional = bool(region) and rng.random() < REGIONAL_SHARE
    while True:
        if not regional:
            query = neutral_query(rng, task, intent, region)
        elif task == "spelling":
            query = _regional_spelling(rng, intent)
        else:
            form = _forms(task, intent, region).draw(rng)
            query = written(rng, task, around(rng, (form, "")), "", form)
        kind = group(query)
        # Public examples leave out validation too, or settings would be chosen on what was learnt.
        if is_test(kind) == test and (region or not is_validation(kind)):
            return query


def neutral_query(rng: Random, task: str, intent: str, region: str) -> Query:
    """Draw a query that is answered alike everywhere."""
    nouns = NOUNS[intent]
    if region and rng.random() < LOCAL_SHARE:
        nouns = LOCAL[region][intent]
    words = around(rng, (pick(rng, nouns), "product"), intent)
    return written(rng, task, words, intent, "")


def _regional_spelling(rng: Random, intent: str) -> Query:
    """Draw a mistyped query of which one word is spelt otherwise elsewhere."""
    key = _families(intent).draw(rng)
    return family_query(rng, key, FAMILIES[key], intent)


def family_query(rng: Random, key: str, family: Family, intent: str) -> Query:
    """Draw a mistyped query of a spelling family that goes by the name `key`."""
    words = [(key, "")]
    if family.role == "modifier":
        words.append((pick(rng, NOUNS[intent]), "product"))
        if rng.random() < 0.5:
            words.insert(0, _context(rng, 1)[0])
    else:
        words = around(rng, words[0])
    typed = pick(rng, family.typed)
    if family.role != "word" and rng.random() < 0.5:
        typed = misspell(rng, typed)
    source = " ".join(typed if word == key else word for word, _ in words)
    if rng.random() < 0.25:
        source = _mistype(rng, [typed if word == key else word for word, _ in words], skip=typed)
    return Query("spelling", source, tuple(words), "", key)


def written(rng: Random, task: str, words: list[Word], intent: str, regional: str) -> Query:
    """Write out what the user typed."""
    plain = [word for word, _ in words]
    source = _mistype(rng, plain) if task == "spelling" else " ".join(plain)
    return Query(task, source, tuple(words), intent, regional)


def around(rng: Random, head: Word, intent: str = "") -> list[Word]:
    """Put one to three other words around a head; brand and material only of a known intent."""
    chosen = _context(rng, pick(rng, CONTEXT_SIZES), intent)
    before = [word for word in chosen if word[1] in _BEFORE]
    after = [word for word in chosen if word[1] not in _BEFORE]
    return [*before, head, *after]


_BEFORE = ("brand", "feature", "size", "colour", "material")
_SLOTS = tuple(CONTEXT)
_RICH_SLOTS = ("brand", "material", *_SLOTS)


def _context(rng: Random, size: int, intent: str = "") -> list[Word]:
    """Draw words of different types, in the order in which a query has them."""
    slots = _RICH_SLOTS if intent else _SLOTS
    chosen = rng.sample(slots, size) if size > 1 else [pick(rng, slots)]
    chosen.sort(key=_RICH_SLOTS.index)
    return [(pick(rng, _words_of(slot, intent)), slot) for slot in chosen]


def _words_of(slot: str, intent: str) -> tuple[str, ...]:
    """Return the words that may fill a slot."""
    if slot == "brand":
        return BRANDS[intent]
    return MATERIALS if slot == "material" else CONTEXT[slot]


@cache
def _forms(task: str, intent: str, region: str) -> _Zipf[str]:
    """Return the contested forms that `region` uses in queries of one intent.

    In an entity query an attribute goes with every intent, each time with its part of the weight.
    """
    weights: dict[str, float] = {}
    for form in _contested(task):
        sense = FORMS[form].get(region)
        if sense and sense.intent == intent:
            weights[form] = 1
        elif sense and sense.intent is None and task == "entities":
            weights[form] = 1 / len(INTENTS)
    return _Zipf(list(weights), list(weights.values()))


@cache
def _contested(task: str) -> tuple[str, ...]:
    """Return the forms of which no reading prevails in more than half of the regions.

    Most entity types are shared by many regions (a word is a product or a brand), so there the
    most contested forms come first; intents are contested enough in the order of the lexicon.
    """
    shares: dict[str, float] = {}
    for form, senses in FORMS.items():
        readings = [s.type if task == "entities" else s.intent for s in senses.values()]
        counts = Counter(reading for reading in readings if reading)
        shares[form] = max(counts.values(), default=1) / max(counts.total(), 1)
    contested = [form for form, share in shares.items() if share <= 0.5]
    return tuple(sorted(contested, key=shares.__getitem__) if task == "entities" else contested)


@cache
def _families(intent: str) -> _Zipf[str]:
    """Return the spelling families that fit an intent."""
    fitting = ("modifier", "word", intent)
    return _Zipf([key for key, family in FAMILIES.items() if family.role in fitting])


def pick(rng: Random, items: Sequence[T]) -> T:
    """Draw one item; several times faster than `Random.choice`."""
    return items[int(rng.random() * len(items))]


_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")


def _neighbours() -> dict[str, str]:
    """Return the keys next to each key of a staggered keyboard."""
    spot = {key: (y, x + y / 2) for y, row in enumerate(_ROWS) for x, key in enumerate(row)}
    return {
        key: "".join(
            other
            for other, (v, u) in spot.items()
            if other != key and abs(v - y) <= 1 and abs(u - x) <= 1
        )
        for key, (y, x) in spot.items()
    }


_NEAR = _neighbours()
_SOUNDS = (
    ("ph", "f"), ("ck", "k"), ("ee", "ea"), ("ea", "ee"), ("oo", "u"), ("sh", "ch"), ("qu", "kw"),
    ("ie", "ei"), ("ou", "ow"), ("er", "ar"), ("c", "k"), ("k", "c"), ("s", "z"), ("z", "s"),
    ("i", "y"), ("y", "i"), ("w", "v"), ("v", "w"), ("g", "j"), ("x", "ks"), ("a", "e"), ("e", "i"),
    ("o", "u"),
)  # fmt: skip
_TAKEN = NEUTRAL_WORDS | REGIONAL_WORDS


def misspell(rng: Random, word: str) -> str:
    """Make one error that people make; the result is never another word of the lexicon."""
    while True:
        wrong = pick(rng, _ERRORS)(rng, word)
        if wrong != word and wrong not in _TAKEN:
            return wrong


def _mistype(rng: Random, words: list[str], skip: str = "") -> str:
    """Make an error in one word of a query, sometimes in two; short words are spared."""
    able = [i for i, word in enumerate(words) if len(word) > 3 and word != skip]
    for index in rng.sample(able, min(len(able), 1 + (rng.random() < 0.25))):
        words[index] = misspell(rng, words[index])
    return " ".join(words)


def _neighbour_key(rng: Random, word: str) -> str:
    at = int(rng.random() * len(word))
    return word[:at] + pick(rng, _NEAR.get(word[at], string.ascii_lowercase)) + word[at + 1 :]


def _dropped(rng: Random, word: str) -> str:
    at = 1 + int(rng.random() * (len(word) - 1))
    return word[:at] + word[at + 1 :]


def _doubled(rng: Random, word: str) -> str:
    at = int(rng.random() * len(word))
    return word[:at] + word[at] + word[at:]


def _transposed(rng: Random, word: str) -> str:
    at = int(rng.random() * (len(word) - 1))
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def _by_ear(rng: Random, word: str) -> str:
    heard = [(sound, other) for sound, other in _SOUNDS if sound in word]
    return word.replace(*pick(rng, heard), 1) if heard else word


_ERRORS = (_neighbour_key, _dropped, _doubled, _transposed, _by_ear)
