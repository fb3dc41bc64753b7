"""Invented regions teach how to learn a region, and nothing about any real one."""

from random import Random

from client_app.datasets.retail import public_examples
from client_app.datasets.retail.generator import is_test
from client_app.datasets.retail.invented import COINED, InventedRegion
from client_app.datasets.retail.lexicon import (
    CONTEXT,
    INTENTS,
    NEUTRAL_WORDS,
    REGIONAL_WORDS,
    TYPES,
)
from client_app.datasets.validation import is_validation

SIZES = set(CONTEXT["size"])
KNOWN = NEUTRAL_WORDS | set(COINED)


def regions(count=60):
    rng = Random(0)
    for _ in range(count):
        region = InventedRegion.draw(rng)
        yield region, region.examples(rng, 90)


def test_no_real_regional_word_occurs():
    for _, examples in regions():
        for example in examples:
            words = set(example.group.split())
            # A kind of query is its words; a size, which is left out of it, is neutral.
            assert not words & REGIONAL_WORDS - NEUTRAL_WORDS
            if example.task != "spelling":
                assert words <= KNOWN


def test_no_kind_of_query_that_is_kept_for_test_or_validation_occurs():
    for _, examples in regions():
        for example in examples:
            # Not in the question, nor in the answer of a spelling, which may be another query.
            kinds = {example.group}
            if example.task == "spelling":
                kinds.add(" ".join(sorted(w for w in example.target.split() if w not in SIZES)))
            assert not any(is_test(kind) or is_validation(kind) for kind in kinds)


def test_public_examples_leave_out_both_too():
    examples = public_examples(0, 3000)
    assert not any(is_test(e.group) or is_validation(e.group) for e in examples)


def test_coined_words_are_words_of_nobody():
    assert len(set(COINED)) == len(COINED)
    assert not set(COINED) & (NEUTRAL_WORDS | REGIONAL_WORDS)


def test_one_region_answers_alike_and_regions_differ():
    intents: dict[str, set[str]] = {}
    for region, examples in regions():
        for example in examples:
            words = example.source.split()
            coined = [word for word in words if word in COINED]
            if example.task == "intent" and coined:
                assert example.target == region.senses[coined[0]].intent
                intents.setdefault(coined[0], set()).add(example.target)
            if example.task == "entities":
                types = example.target.split()
                assert len(types) == len(words)
                assert set(types) <= set(TYPES)
                if coined:
                    assert types[words.index(coined[0])] == region.senses[coined[0]].type
    assert all(set(INTENTS) >= found for found in intents.values())
    assert sum(len(found) > 1 for found in intents.values()) > len(COINED) / 2


def test_a_spelling_of_the_region_is_its_own_everywhere():
    for region, examples in regions(20):
        for example in examples:
            if example.task == "spelling":
                for noun, (family, right) in region.families.items():
                    if family.role == "word" and set(example.source.split()) & set(family.typed):
                        assert right in example.target.split() or noun in example.target.split()


def test_the_same_seed_invents_the_same():
    assert [e for _, es in regions(3) for e in es] == [e for _, es in regions(3) for e in es]
