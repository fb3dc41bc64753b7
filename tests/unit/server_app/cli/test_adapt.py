"""What is said of a user's model: help, harm, or that nobody can tell."""

import pytest

from server_app.cli.adapt import verdict_of


@pytest.mark.parametrize(
    ("user", "region", "text"),
    [
        ([1.0] * 30, [0.0] * 29 + [1.0], "it helps"),
        ([0.0] * 29 + [1.0], [1.0] * 30, "it hurts"),
        ([1.0, 0.0], [0.0, 0.0], "no clear difference"),
        ([1.0], [0.0], "no clear difference"),
        ([0.5] * 9, [0.5] * 9, "no clear difference"),
    ],
)
def test_the_verdict_is_about_the_paired_difference(
    user: list[float], region: list[float], text: str
) -> None:
    """Beyond two standard errors it is one."""
    assert verdict_of(user, region).text.startswith(text)


def test_the_error_is_that_of_the_mean_difference() -> None:
    """By hand: differences 1, 0, -1, 1."""
    verdict = verdict_of([1.0, 0.5, 0.0, 1.0], [0.0, 0.5, 1.0, 0.0])
    assert verdict.gain == 0.25
    assert verdict.error == pytest.approx((2.75 / 3) ** 0.5 / 2)
