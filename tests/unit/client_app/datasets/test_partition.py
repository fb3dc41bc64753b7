"""The partitioner keeps its promises for every labelling, and redraws nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_app.datasets.partition import dirichlet_partition, dirichlet_shares, split_by_group
from regionfed.errors import DataError

ALPHAS = [1e-9, 1e-3, 0.3, 1.0, 1e6, 1e9]
labellings = st.lists(st.integers(0, 60), max_size=150)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(labellings, st.integers(1, 12), st.sampled_from(ALPHAS), st.data())
@settings(deadline=None)
def test_every_row_once_and_every_part_at_least_the_minimum(labels, parts, alpha, data):
    minimum = data.draw(st.integers(0, len(labels) // parts))
    seed = data.draw(st.integers(0, 2**32))

    shared = dirichlet_partition(labels, parts, alpha, minimum, generator(seed))

    assert len(shared) == parts
    assert sorted(np.concatenate(shared)) == list(range(len(labels)))
    assert min(part.size for part in shared) >= minimum
    assert all(np.all(np.diff(part) > 0) for part in shared)
    again = dirichlet_partition(labels, parts, alpha, minimum, generator(seed))
    assert all(np.array_equal(a, b) for a, b in zip(shared, again, strict=True))


@given(st.integers(0, 30), st.integers(1, 30), st.sampled_from(ALPHAS), st.integers(0, 2**32))
@settings(deadline=None)
def test_shares_are_finite_and_sum_to_one(classes, parts, alpha, seed):
    shares = dirichlet_shares(classes, parts, alpha, generator(seed))
    assert shares.shape == (classes, parts)
    assert np.all(np.isfinite(shares)) and np.all(shares >= 0)
    assert shares.sum(axis=1) == pytest.approx(np.ones(classes))


def test_shares_follow_the_dirichlet_distribution():
    alpha, parts = 0.3, 8
    shares = dirichlet_shares(20_000, parts, alpha, generator())
    variance = (1 / parts) * (1 - 1 / parts) / (alpha * parts + 1)
    assert shares.mean(axis=0) == pytest.approx(np.full(parts, 1 / parts), abs=0.01)
    assert shares.var(axis=0) == pytest.approx(np.full(parts, variance), rel=0.05)


def test_tiny_alpha_gives_a_class_to_one_part():
    labels = np.repeat(np.arange(20), 50)
    shared = dirichlet_partition(labels, 8, 1e-3, 0, generator())
    counts = np.array([np.bincount(labels[part], minlength=20) for part in shared])
    assert np.mean(counts.max(axis=0) == 50) > 0.9


def test_large_alpha_gives_even_parts():
    labels = np.repeat(np.arange(5), 80)
    for part in dirichlet_partition(labels, 8, 1e6, 0, generator()):
        assert np.all(np.abs(np.bincount(labels[part], minlength=5) - 10) <= 1)


def test_classes_of_one_row_have_no_favourite_part():
    labels = np.arange(8_000)
    sizes = [part.size for part in dirichlet_partition(labels, 8, 1e6, 0, generator())]
    assert sizes == pytest.approx([1_000] * 8, rel=0.12)


def test_a_part_that_is_filled_stays_skewed():
    labels = np.tile(np.arange(20), 50)
    shared = dirichlet_partition(labels, 10, 1e-3, 80, generator(3))
    natural = dirichlet_partition(labels, 10, 1e-3, 0, generator(3))
    filled = [part for part, was in zip(shared, natural, strict=True) if was.size < 40]
    assert filled
    for part in filled:
        assert np.unique(labels[part]).size <= 10  # Half the classes; a mixture has all 20.


def test_two_levels_eight_regions_of_ten_clients():
    labels = generator(1).integers(0, 17, 5_000)
    rng = generator(2)
    seen = []
    for region in dirichlet_partition(labels, 8, 0.3, 100, rng):
        for client in dirichlet_partition(labels[region], 10, 0.3, 5, rng):
            assert client.size >= 5
            seen.extend(region[client])
    assert sorted(seen) == list(range(5_000))


def test_global_random_state_is_neither_read_nor_moved():
    np.random.seed(1)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first = dirichlet_partition(range(50), 4, 0.3, 5, generator())
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002
    np.random.seed(2)  # noqa: NPY002
    second = dirichlet_partition(range(50), 4, 0.3, 5, generator())
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_too_few_rows_names_the_numbers_and_the_remedy():
    with pytest.raises(DataError, match=r"7 rows cannot give 4 parts .* 8.* minimum to 1"):
        dirichlet_partition([0] * 7, 4, 0.3, 2, generator())


@pytest.mark.parametrize("alpha", [0.0, -0.0, -1.0, float("nan"), float("inf"), 1e-300, 1e300])
def test_alpha_out_of_range(alpha):
    with pytest.raises(DataError, match="concentration"):
        dirichlet_partition([0, 1], 2, alpha, 0, generator())


@pytest.mark.parametrize(
    ("labels", "parts", "minimum"),
    [([0, 1], 0, 0), ([0, 1], -1, 0), ([0, 1], 1, -1), ([[0]], 1, 0)],
)
def test_arguments_out_of_range(labels, parts, minimum):
    with pytest.raises(DataError):
        dirichlet_partition(labels, parts, 0.3, minimum, generator())


@given(st.lists(st.text(max_size=5), max_size=80), st.integers(-(2**40), 2**70))
@settings(deadline=None)
def test_groups_are_never_on_both_sides(groups, seed):
    train, test = split_by_group(groups, 0.3, seed)
    assert sorted([*train, *test]) == list(range(len(groups)))
    assert not {groups[i] for i in train} & {groups[i] for i in test}


def test_side_of_a_group_does_not_depend_on_the_other_rows():
    groups = [f"query {n}" for n in range(500)]
    held_out = {groups[i] for i in split_by_group(groups, 0.2, 7)[1]}
    fewer = groups[400:250:-1]
    assert {fewer[i] for i in split_by_group(fewer, 0.2, 7)[1]} == held_out & set(fewer)


def test_held_out_fraction_seed_and_a_fixed_vector():
    groups = [f"query {n}" for n in range(5_000)]
    assert split_by_group(groups, 0.2, 0)[1].size == pytest.approx(1_000, rel=0.1)
    assert split_by_group(groups, 0.0, 0)[1].size == 0
    assert not np.array_equal(split_by_group(groups, 0.2, 0)[1], split_by_group(groups, 0.2, 1)[1])
    # Written down so that a new release does not move queries from test to train.
    assert split_by_group(groups[:30], 0.2, 0)[1].tolist() == [3, 4, 10, 19, 25, 27, 28]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_fraction_out_of_range(fraction):
    with pytest.raises(DataError, match="fraction"):
        split_by_group(["a"], fraction, 0)
