"""Epsilon: known values, an independent check, and the ends of the range."""

import math

import pytest
from scipy import stats
from scipy.optimize import brentq

from regionfed.privacy.accountant import Counts, count_releases, epsilon, epsilon_rdp


def rounds(z: float, q: float = 0.1, n: int = 50) -> Counts:
    return (((z, q), n),)


def test_the_reference_point_of_the_published_setting() -> None:
    """sigma 4, q 0.1, T 50, delta 1e-5: 0.684 by PLD, 0.758 by RDP."""
    assert epsilon(rounds(4.0), 1e-5) == pytest.approx(0.684, abs=5e-4)
    assert epsilon_rdp(rounds(4.0), 1e-5) == pytest.approx(0.758, abs=5e-4)


@pytest.mark.parametrize(
    ("target", "root", "quoted"),
    [(0.6, 4.470, 4.476), (1.0, 2.930, 2.932), (4.0, 1.1445, 1.147), (8.0, 0.803, 0.804)],
)
def test_the_noise_that_reaches_an_epsilon(target: float, root: float, quoted: float) -> None:
    """q 0.1, T 50, delta 1e-5: the root of epsilon(z) = target.

    The roots hold on a grid ten times finer too. The figures that the documentation quotes lie a
    fifth of a percent above them: they keep the target, and hardly more.
    """
    z = brentq(lambda z: epsilon(rounds(z), 1e-5) - target, 0.5, 8.0, xtol=1e-5)
    assert z == pytest.approx(root, abs=6e-4)
    assert 0.99 * target <= epsilon(rounds(quoted), 1e-5) <= target


@pytest.mark.parametrize("delta", [1e-5, 1e-9])
@pytest.mark.parametrize("z", [0.5, 1.0, 3.0])
def test_one_unsampled_release_is_the_gaussian_mechanism(z: float, delta: float) -> None:
    """Against the exact formula (Balle and Wang 2018); the bound errs upwards, and little."""

    def exact_delta(eps: float) -> float:
        a, b = 0.5 / z, eps * z
        return float(stats.norm.cdf(a - b) - math.exp(eps) * stats.norm.cdf(-a - b))

    exact = brentq(lambda eps: exact_delta(eps) - delta, 0.0, 60.0, xtol=1e-9)
    assert exact <= epsilon((((z, 1.0), 1),), delta) <= exact + 0.01


@pytest.mark.parametrize("z", [0.6, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("q", [0.01, 0.1, 1.0])
def test_pld_is_never_above_rdp(z: float, q: float) -> None:
    """Two independent upper bounds; the one we quote is the tighter, up to its grid of 1e-3."""
    counts = rounds(z, q, 20)
    assert 0.0 <= epsilon(counts, 1e-5) <= epsilon_rdp(counts, 1e-5) + 1e-3


def test_nothing_released_costs_nothing() -> None:
    """D6: 0, not a small number: no release, none of a kind, or nobody ever sampled."""
    assert epsilon((), 1e-5) == 0.0
    assert epsilon((((1.0, 0.1), 0),), 1e-5) == 0.0
    assert epsilon((((1.0, 0.0), 50),), 1e-5) == 0.0
    assert epsilon((((0.0, 0.0), 50),), 1e-5) == 0.0


def test_a_release_without_noise_costs_everything() -> None:
    """One is enough, whatever else was noised, and however rarely it samples."""
    assert epsilon((((0.0, 1.0), 1),), 1e-5) == math.inf
    assert epsilon((((0.0, 0.001), 1), ((4.0, 0.1), 50)), 1e-5) == math.inf


def test_epsilon_moves_the_right_way() -> None:
    """More rounds, a larger sample, less noise or a smaller delta never cost less."""
    base = epsilon(rounds(2.0), 1e-5)
    assert epsilon(rounds(2.0, n=60), 1e-5) > base
    assert epsilon(rounds(2.0, q=0.2), 1e-5) > base
    assert epsilon(rounds(1.5), 1e-5) > base
    assert epsilon(rounds(2.0), 1e-7) > base


def test_amplification_is_only_for_what_was_sampled() -> None:
    """q = 1 is the plain Gaussian mechanism, q just below it costs almost as much."""
    assert epsilon(rounds(2.0, q=0.1), 1e-5) < 0.5 * epsilon(rounds(2.0, q=1.0), 1e-5)
    assert epsilon(rounds(2.0, q=0.999), 1e-5) == pytest.approx(
        epsilon(rounds(2.0, q=1.0), 1e-5), rel=0.01
    )


def test_the_order_of_releases_does_not_matter() -> None:
    """Equal releases are counted; a ledger of the same events has the same epsilon."""
    one, other = (4.0, 0.1), (8.0, 1.0)
    assert count_releases([one, other, one]) == count_releases([one, one, other])
    assert count_releases([one, other, one]) == (((4.0, 0.1), 2), ((8.0, 1.0), 1))
    assert count_releases([]) == ()


def test_two_releases_of_one_sample_cost_as_much_as_their_joint_mechanism() -> None:
    """Gaussian releases on everyone compose to z_eff = (z_1^-2 + z_2^-2)^-1/2 exactly."""
    z_eff = (3.0**-2 + 6.0**-2) ** -0.5
    two = epsilon((((3.0, 1.0), 5), ((6.0, 1.0), 5)), 1e-5)
    assert two == pytest.approx(epsilon((((z_eff, 1.0), 5),), 1e-5), rel=0.01)


def test_large_epsilon_is_a_number() -> None:
    """D6: no overflow where noise is small and releases are many."""
    value = epsilon(rounds(0.2, q=0.1, n=20), 1e-5)
    assert math.isfinite(value) and value > 50.0
