"""The variants of the published job differ in what they say, and in nothing else."""

from dataclasses import asdict

from benchmarks.paper import VARIANTS
from regionfed.config import Config


def test_descent_signs_are_all_that_tells_the_variants_without_noise_apart() -> None:
    """A profile would put the published sign back."""
    published, descent = (
        asdict(Config.from_run_config(VARIANTS[name]))
        for name in ("without noise", "without noise, descent signs")
    )
    differences = {key for key, value in published.items() if descent[key] != value}
    assert differences == {"profile", "sign"}
    assert (published["sign"], descent["sign"]) == ("published", "descent")
