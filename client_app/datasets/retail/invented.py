"""Invented regions, on which a public model learns to be taught.

A real region uses words that the public model has never seen, each in a sense of the region's own.
An invented region does the same with words that do not exist: senses and spellings are drawn
at random, anew for every invented region. They tell nothing of any real region, only that
there are regions: a model pretrained on many needs few steps, so little privacy, to learn one.
"""

from dataclasses import dataclass
from random import Random

from client_app.datasets.dataset import Example
from client_app.datasets.retail.generator import (
    REGIONAL_SHARE,
    TASKS,
    Query,
    around,
    family_query,
    group,
    is_test,
    misspell,
    neutral_query,
    pick,
    written,
)
from client_app.datasets.retail.lexicon import (
    INTENTS,
    NEUTRAL_WORDS,
    NOUNS,
    REGIONAL_WORDS,
    TYPES,
    Family,
    Sense,
)
from client_app.datasets.validation import is_validation


def _coined(count: int) -> tuple[str, ...]:
    """Coin words of two or three syllables that are in no lexicon, the same ones every time."""
    rng = Random("retail/coined")
    words: dict[str, None] = {}
    while len(words) < count:
        syllables = (pick(rng, "bdfgklmnprstvz") + pick(rng, "aeiou") for _ in range(3))
        word = "".join(syllables)[: 5 + int(rng.random() * 2)]
        if word not in NEUTRAL_WORDS | REGIONAL_WORDS:
            words[word] = None
    return tuple(words)


COINED = _coined(64)
"""Words that do not exist."""

_FORMS, _FAMILIES = 16, 8
_COMMON_TYPES = ("product", "product", "brand", "brand", *TYPES)
_COMMON_NOUNS = tuple(noun for nouns in NOUNS.values() for noun in nouns)


@dataclass(frozen=True)
class InventedRegion:
    """What the coined words of one invented region mean, and how it spells some known ones."""

    senses: dict[str, Sense]
    families: dict[str, tuple[Family, str]]

    @classmethod
    def draw(cls, rng: Random) -> "InventedRegion":
        """Invent a region."""
        return cls(
            {
                form: Sense(pick(rng, _COMMON_TYPES), pick(rng, INTENTS))
                for form in rng.sample(COINED, _FORMS)
            },
            {noun: _invented_family(rng, noun) for noun in rng.sample(_COMMON_NOUNS, _FAMILIES)},
        )

    def examples(self, rng: Random, size: int) -> list[Example]:
        """Generate queries, the tasks in turn; none is of a kind kept for test or validation."""
        return [self._example(rng, TASKS[i % len(TASKS)]) for i in range(size)]

    def _example(self, rng: Random, task: str) -> Example:
        while True:
            query, target = self._asked(rng, task)
            kind = group(query)
            if not is_test(kind) and not is_validation(kind):
                return Example(task, query.source, target, kind)

    def _asked(self, rng: Random, task: str) -> tuple[Query, str]:
        """Draw a query and its answer."""
        intent = pick(rng, INTENTS)
        if rng.random() >= REGIONAL_SHARE:
            query = neutral_query(rng, task, intent, "")
            targets = {
                "intent": query.intent,
                "spelling": " ".join(word for word, _ in query.words),
                "entities": " ".join(kind for _, kind in query.words),
            }
            return query, targets[task]
        if task == "spelling":
            key = pick(rng, tuple(self.families))
            family, right = self.families[key]
            query = family_query(rng, key, family, intent)
            # The kind of a query is what is meant: another word, where this region reads it so.
            words = tuple((right if word == key else word, kind) for word, kind in query.words)
            return query._replace(words=words), " ".join(word for word, _ in words)
        form = pick(rng, tuple(self.senses))
        sense = self.senses[form]
        query = written(rng, task, around(rng, (form, "")), "", form)
        if task == "intent":
            return query, sense.intent or ""
        return query, " ".join(kind or sense.type for _, kind in query.words)


def _invented_family(rng: Random, noun: str) -> tuple[Family, str]:
    """Invent spellings of a known word, or other words that it is mistaken for; one is right."""
    variants = tuple(misspell(rng, noun) for _ in range(3))
    if rng.random() < 0.5:
        return Family("modifier", (noun, *variants), {}), pick(rng, (noun, *variants))
    return Family("word", variants, {}), pick(rng, (noun, *rng.sample(_COMMON_NOUNS, 2)))
