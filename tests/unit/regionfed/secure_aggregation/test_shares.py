"""Shamir: any t recover the secret, fewer tell nothing."""

import itertools
import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regionfed.errors import ContractError
from regionfed.secure_aggregation.shares import PRIME, SHARE, combine, split, weights


def test_the_field_is_a_prime_field_wider_than_a_secret() -> None:
    """Fermat's test to forty bases; every secret of 256 bits is an element."""
    assert PRIME > 2**256
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in range(2, 42))
    assert PRIME - 1 < 256**SHARE


@given(st.binary(min_size=32, max_size=32), st.integers(1, 7), st.data())
def test_any_threshold_of_shares_recovers_the_secret(
    secret: bytes, threshold: int, data: st.DataObject
) -> None:
    """Also of all zeros and all ones; more than the threshold as well."""
    holders = [0, 2, 3, 5, 8, 9, 11]
    shares = split(secret, holders, threshold)
    some = data.draw(st.lists(st.sampled_from(holders), unique=True, min_size=threshold))
    assert combine({h: shares[h] for h in some}, weights(some)) == secret


def test_fewer_shares_fit_every_secret() -> None:
    """With t - 1 shares of one secret, a t-th can be found that makes them shares of any other."""
    holders, threshold = [0, 1, 2, 3], 3
    shares = split(bytes(32), holders, threshold)
    for other in (b"\xff" * 32, secrets.token_bytes(32)):
        weight = weights([0, 1, 2])
        known = sum(weight[h] * int.from_bytes(shares[h], "big") for h in (0, 1))
        third = (int.from_bytes(other, "big") - known) * pow(weight[2], -1, PRIME) % PRIME
        held = {0: shares[0], 1: shares[1], 2: third.to_bytes(SHARE, "big")}
        assert combine(held, weight) == other


def test_too_few_shares_recover_something_else() -> None:
    """Nothing says that they are too few; the commitment to the secret does."""
    secret = secrets.token_bytes(32)
    shares = split(secret, range(5), 3)
    for pair in itertools.combinations(range(5), 2):
        try:
            assert combine({h: shares[h] for h in pair}, weights(pair)) != secret
        except ContractError as error:
            assert "belong to no secret" in str(error)


def test_shares_are_drawn_anew() -> None:
    """Two splits of one secret have no share in common."""
    one, two = (split(bytes(32), range(4), 2) for _ in range(2))
    assert not set(one.values()) & set(two.values())


@pytest.mark.parametrize(("holders", "threshold"), [([0, 0], 1), ([0, 1], 3), ([0], 0)])
def test_nonsense_is_refused(holders: list[int], threshold: int) -> None:
    with pytest.raises(ValueError, match="distinct holders"):
        split(bytes(32), holders, threshold)
