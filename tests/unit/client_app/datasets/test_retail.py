"""The embedded dataset: reproducible, never leaking, and regional by construction."""

import math
import random
from collections import Counter
from itertools import product

import pytest

from client_app.datasets.dataset import ClientData, DataConfig
from client_app.datasets.retail import load, public_examples, region_blind_ceiling
from client_app.datasets.retail.generator import (
    REGIONAL_SHARE,
    TASKS,
    answer,
    client_queries,
    label_shares,
    labels,
    misspell,
)
from client_app.datasets.retail.lexicon import (
    FAMILIES,
    FORMS,
    INTENTS,
    LOCAL,
    NEUTRAL_WORDS,
    REGIONAL_WORDS,
    REGIONS,
    TYPES,
)
from regionfed.errors import DataError

SMALL = DataConfig(clients_per_region=3, examples_per_client=150)


def everything(config: DataConfig) -> dict[tuple[str, int], ClientData]:
    dataset = load(config)
    devices = product(dataset.regions, range(config.clients_per_region))
    return {(region, client): dataset.client(region, client) for region, client in devices}


@pytest.fixture(scope="module")
def corpus() -> dict[tuple[str, int], ClientData]:
    return everything(SMALL)


@pytest.fixture(scope="module")
def queries():
    """(region, query) pairs of many devices."""
    return [
        (region, query)
        for region in REGIONS
        for client in range(2)
        for query in client_queries(5, region, client, 1.0, 600, test=False)
    ]


def test_an_example_depends_only_on_seed_region_and_device() -> None:
    # Other lists of regions, other devices before it, and the global generator change nothing.
    config = DataConfig(clients_per_region=2, examples_per_client=60)
    first = load(config).client("IN", 1)
    random.seed(99)
    load(DataConfig(regions=4, clients_per_region=5, examples_per_client=60)).client("UK", 4)
    alone = load(DataConfig(regions=3, clients_per_region=2, examples_per_client=60))
    assert alone.client("IN", 1) == first
    state = random.getstate()
    alone.client("US", 0)
    assert random.getstate() == state


def test_seed_region_and_device_each_change_the_examples() -> None:
    variants = [
        load(DataConfig(seed=seed)).client(region, client).train
        for seed, region, client in ((0, "US", 0), (1, "US", 0), (0, "UK", 0), (0, "US", 1))
    ]
    assert all(a != b for i, a in enumerate(variants) for b in variants[:i])


def test_the_default_corpus_never_changes() -> None:
    # The shipped model was trained on this vocabulary; results are comparable only on these bytes.
    example = load(DataConfig()).client("DE", 7).test[4]
    assert (example.task, example.source, example.target) == (
        "spelling",
        "christmas grau broccoli",
        "christmas grau broccoli",
    )


def test_no_kind_of_query_is_on_both_sides_anywhere(corpus) -> None:
    train = {example.group for data in corpus.values() for example in data.train}
    test = {example.group for data in corpus.values() for example in data.test}
    public = {example.group for example in public_examples(3, 3000)}
    assert train
    assert test
    assert not train & test
    assert not public & test


def test_a_kind_ignores_order_and_size_but_nothing_else(queries) -> None:
    for _, query in queries:
        kinds = dict(query.words)
        assert all(kinds[word] == "size" for word in kinds if word not in _group_words(query))


def _group_words(query) -> set[str]:
    from client_app.datasets.retail.generator import group

    return set(group(query).split())


@pytest.mark.parametrize(("size", "tests"), [(1, 12), (7, 12), (150, 15), (601, 60)])
@pytest.mark.parametrize("dirichlet", [1e-3, 0.3, 1e6])
def test_exact_counts_and_balanced_tasks(size: int, tests: int, dirichlet: float) -> None:
    config = DataConfig(examples_per_client=size, dirichlet=dirichlet)
    data = load(config).client("BR", 0)
    assert (len(data.train), len(data.test)) == (size, tests)
    for side in (data.train, data.test):
        counts = Counter(example.task for example in side)
        assert max(counts.values()) - min(counts[task] for task in TASKS) <= 1


def test_skewed_labels_keep_their_minima() -> None:
    rng = random.Random(0)
    for size, minimum in ((600, 6), (60, 1), (7, 0)):
        shares = label_shares(rng, 1e-3)
        counts = Counter(labels(rng, shares, size))
        assert counts.total() == size
        assert max(shares) > 0.99
        assert min(counts[intent] for intent in INTENTS) == minimum


def test_label_shares_are_a_dirichlet() -> None:
    rng = random.Random(0)
    for concentration in (0.3, 2.0):
        draws = [label_shares(rng, concentration) for _ in range(4000)]
        assert all(math.isclose(sum(draw), 1) for draw in draws)
        k = len(INTENTS)
        variance = sum((draw[0] - 1 / k) ** 2 for draw in draws) / len(draws)
        expected = (1 / k) * (1 - 1 / k) / (k * concentration + 1)
        assert variance == pytest.approx(expected, rel=0.12)


def test_the_regional_share_is_what_it_says(queries) -> None:
    for task in TASKS:
        regional = [bool(query.regional) for _, query in queries if query.task == task]
        error = math.sqrt(REGIONAL_SHARE * (1 - REGIONAL_SHARE) / len(regional))
        assert abs(sum(regional) / len(regional) - REGIONAL_SHARE) < 4 * error


def test_only_regional_queries_depend_on_the_region(queries) -> None:
    for region, query in queries:
        targets = {answer(query, other) for other in REGIONS} - {None}
        assert answer(query, region) in targets
        assert (len(targets) > 1) == bool(query.regional), query


def test_words_around_a_form_are_drawn_alike_in_every_region() -> None:
    # Otherwise the context would tell the region, and the ceiling would be wrong.
    counts = {}
    for region in ("US", "JP"):
        drawn = client_queries(0, region, 0, 1e6, 9000, test=False)
        around = [
            word
            for query in drawn
            if query.regional and query.task != "spelling"
            for word, kind in query.words
            if kind
        ]
        counts[region] = Counter(around)
    for word, count in counts["US"].items():
        assert abs(count - counts["JP"][word]) < 6 * math.sqrt(count + 10), word


def test_the_region_blind_ceiling_leaves_room() -> None:
    ceiling = region_blind_ceiling(load(DataConfig()))
    assert set(ceiling) == set(TASKS)
    for task, bound in ceiling.items():
        assert 0.3 < bound.regional < 0.6, task
        assert bound.overall == pytest.approx(0.5 + bound.regional / 2, abs=0.05)


def test_entities_align_word_by_word(corpus) -> None:
    for data in corpus.values():
        for example in data.train + data.test:
            if example.task == "entities":
                types = example.target.split()
                assert len(types) == len(example.source.split())
                assert set(types) <= set(TYPES)


def test_targets_are_from_the_closed_sets(corpus) -> None:
    for (region, _), data in corpus.items():
        spelt = {family.spelling[region] for family in FAMILIES.values()}
        local = {word for words in LOCAL[region].values() for word in words}
        for example in data.train:
            if example.task == "intent":
                assert example.target in INTENTS
            if example.task == "spelling":
                assert set(example.target.split()) <= NEUTRAL_WORDS | spelt | local


def test_mistyped_queries_are_mistyped_and_short(corpus) -> None:
    examples = [example for data in corpus.values() for example in data.train]
    spelling = [example for example in examples if example.task == "spelling"]
    unchanged = sum(example.source == example.target for example in spelling)
    assert unchanged / len(spelling) < 0.1
    assert all(1 <= len(example.source.split()) <= 5 for example in examples)
    assert all(len(example.source.split()) == len(example.target.split()) for example in spelling)


def test_a_misspelling_is_never_another_word() -> None:
    rng = random.Random(0)
    for word in sorted(word for word in NEUTRAL_WORDS if len(word) > 3):
        wrong = misspell(rng, word)
        assert wrong != word
        assert wrong not in NEUTRAL_WORDS | REGIONAL_WORDS


def test_public_examples_hold_nothing_regional() -> None:
    examples = public_examples(0, 3000)
    assert examples == public_examples(0, 3000)
    assert Counter(example.task for example in examples) == dict.fromkeys(TASKS, 1000)
    words = {
        word
        for example in examples
        for word in (example.target if example.task == "spelling" else example.source).split()
    }
    assert not words & REGIONAL_WORDS


def test_the_lexicon_is_consistent() -> None:
    assert not NEUTRAL_WORDS & REGIONAL_WORDS
    for senses in FORMS.values():
        assert set(senses) <= set(REGIONS)
        assert {sense.type for sense in senses.values()} <= set(TYPES)
        assert {sense.intent for sense in senses.values()} <= {*INTENTS, None}
    assert all(len(set(family.spelling.values())) > 1 for family in FAMILIES.values())
    assert all(set(local) == set(INTENTS) for local in LOCAL.values())


def test_errors_say_what_is_possible() -> None:
    with pytest.raises(DataError, match=r"8 regions .* found 9"):
        load(DataConfig(regions=9))
    with pytest.raises(DataError, match="examples_per_client must be above 0"):
        load(DataConfig(examples_per_client=0))
    dataset = load(DataConfig(regions=2))
    with pytest.raises(DataError, match=r"no region 'DE'.*Known: US, UK"):
        dataset.client("DE", 0)
    with pytest.raises(DataError, match="no device 10"):
        dataset.client("US", 10)
