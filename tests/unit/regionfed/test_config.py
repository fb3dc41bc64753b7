"""Settings are validated once, in one place, and each error says what to type."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regionfed.config import PROFILES, Config, key_of
from regionfed.errors import ConfigurationError

FLOATS = [key_of(f) for f in fields(Config) if isinstance(f.default, float)]
INTS = [
    key_of(f) for f in fields(Config) if isinstance(f.default, int) and type(f.default) is not bool
]
TEXTS = [key_of(f) for f in fields(Config) if isinstance(f.default, str)]
RULES = {key_of(f): f.metadata for f in fields(Config)}


def test_nothing_given_is_all_defaults() -> None:
    """An empty run configuration is a valid one."""
    assert Config.from_run_config({}) == Config()


def test_every_default_keeps_its_own_rules() -> None:
    """The flat configuration of the defaults validates, and is the same configuration."""
    flat = Config().to_run_config()
    assert Config.from_run_config(flat) == Config()
    assert all("_" not in key for key in flat)


def test_every_setting_explains_itself() -> None:
    """A setting without a line of help is not finished."""
    assert all(len(rule["help"]) > 10 for rule in RULES.values())


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, -1e-300])
def test_no_float_is_nan_infinite_or_negative(key: str, value: float) -> None:
    """D1: the error names the key and the range."""
    with pytest.raises(ConfigurationError, match=f"^{key}=.*must be a finite number in"):
        Config.from_run_config({key: value})


@pytest.mark.parametrize("key", [k for k in FLOATS if RULES[k]["open_low"]])
@pytest.mark.parametrize("value", [0.0, -0.0, 0])
def test_an_open_bound_excludes_zero_and_negative_zero(key: str, value: float) -> None:
    """D1: -0.0 is zero, for clip norm, delta, rate and the rest."""
    with pytest.raises(ConfigurationError, match=f"^{key}="):
        Config.from_run_config({key: value})


@pytest.mark.parametrize("key", [k for k in RULES if RULES[k]["high"] is not None])
def test_upper_bounds_are_kept(key: str) -> None:
    """A bound itself is allowed unless it is open; what lies above it never is."""
    high, kind = RULES[key]["high"], float if key in FLOATS else int
    above = high + 1 if kind is int else math.nextafter(high, math.inf)
    with pytest.raises(ConfigurationError, match=f"^{key}="):
        Config.from_run_config({key: kind(above)})
    if RULES[key]["open_high"]:
        with pytest.raises(ConfigurationError, match=f"^{key}="):
            Config.from_run_config({key: kind(high)})
    else:
        config = Config.from_run_config({key: kind(high)})
        assert config.to_run_config()[key] == high


@pytest.mark.parametrize("key", [k for k in INTS if RULES[k]["low"] is not None])
def test_lower_bounds_of_counts_are_kept(key: str) -> None:
    """One below the least value is refused."""
    with pytest.raises(ConfigurationError, match=f"^{key}="):
        Config.from_run_config({key: int(RULES[key]["low"]) - 1})


@pytest.mark.parametrize("key", INTS)
@pytest.mark.parametrize("value", [True, 1.0, "1", None, [1]])
def test_a_count_is_an_int_and_nothing_else(key: str, value: Any) -> None:
    """No value is guessed from another type."""
    with pytest.raises(ConfigurationError, match=f"^{key}=.*expected int"):
        Config.from_run_config({key: value})


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("value", [True, "1.0", None])
def test_a_float_is_a_number(key: str, value: Any) -> None:
    """An int may stand for a float; a bool or a text may not."""
    with pytest.raises(ConfigurationError, match=f"^{key}=.*expected float"):
        Config.from_run_config({key: value})


def test_an_int_stands_for_a_float() -> None:
    """`target-epsilon=4` is what people type."""
    config = Config.from_run_config({"target-epsilon": 4})
    assert config.target_epsilon == 4.0 and type(config.target_epsilon) is float


@pytest.mark.parametrize("key", TEXTS)
def test_a_text_is_a_text(key: str) -> None:
    """A number is not turned into one."""
    with pytest.raises(ConfigurationError, match=f"^{key}=.*expected str"):
        Config.from_run_config({key: 3})


@pytest.mark.parametrize("key", [k for k in TEXTS if RULES[k]["choices"]])
def test_a_choice_that_does_not_exist_is_refused_with_the_list(key: str) -> None:
    """The error names what is allowed."""
    with pytest.raises(ConfigurationError, match=f"^{key}='nonsense'.*Allowed: "):
        Config.from_run_config({key: "nonsense"})


def test_a_near_miss_is_corrected() -> None:
    """F10: an unknown key or choice names its nearest match."""
    with pytest.raises(ConfigurationError, match="'clip-nrom'; did you mean 'clip-norm'"):
        Config.from_run_config({"clip-nrom": 1.0})
    with pytest.raises(ConfigurationError, match="did you mean 'clip-norm'"):
        Config.from_run_config({"clip_norm": 1.0})
    with pytest.raises(ConfigurationError, match="did you mean 'sketch'"):
        Config.from_run_config({"conflict": "skecth"})


def test_combinations_that_cannot_work_are_refused() -> None:
    """More regions must answer than there are."""
    with pytest.raises(ConfigurationError, match="min-regions=3 exceeds regions=2"):
        Config.from_run_config({"regions": 2, "min-regions": 3})


@pytest.mark.parametrize("release", ["noised", "off"])
def test_scores_of_users_own_models_leave_with_consent_only(release: str) -> None:
    """Noise on held-out scores would not cover the training examples behind them."""
    both = {"user-scores": "panel", "evaluation-privacy": release}
    with pytest.raises(ConfigurationError, match="needs evaluation-privacy='panel'"):
        Config.from_run_config(both)
    assert Config.from_run_config({**both, "evaluation-privacy": "panel"}).user_scores == "panel"


def test_without_privacy_no_score_is_called_noised() -> None:
    """The record must not pretend."""
    config = Config.from_run_config({"privacy-mode": "none", "evaluation-privacy": "noised"})
    assert config.evaluation_privacy == "panel"


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 2**31),
            "clip-norm": st.floats(1e-6, 1e6),
            "delta": st.floats(1e-12, 0.5),
            "sampling-rate": st.floats(1e-6, 1.0),
            "conflict": st.sampled_from(["sketch", "debiased", "raw"]),
            "privacy-mode": st.sampled_from(["dp", "none"]),
            "model": st.text(),
        },
    )
)
def test_a_configuration_written_down_is_read_back_equal(flat: dict[str, Any]) -> None:
    """A resumed run has the settings of the first."""
    config = Config.from_run_config(flat)
    assert Config.from_run_config(config.to_run_config()) == config


# ------------------------------------------------------------------------------------- profiles
def test_the_paper_s_profile_is_the_published_settings() -> None:
    """C = 1, sigma = 4, T = 50, q = 0.1, a_min = 0.5, their signs, search and mechanism."""
    paper = Config.from_run_config({"profile": "paper"})
    assert (paper.clip_norm, paper.noise_multiplier, paper.rounds) == (1.0, 4.0, 50)
    assert (paper.sampling_rate, paper.alpha_min) == (0.1, 0.5)
    assert (paper.sign, paper.rho_search, paper.unit) == (
        "published",
        "published",
        "example-in-mean",
    )
    assert (paper.rho_high, paper.rho_evaluations, paper.conflict) == (1.0, 7, "raw")


def test_a_setting_of_one_s_own_wins_over_the_profile() -> None:
    """Also when Flower hands over all the others with their practical defaults."""
    given = {
        **Config().to_run_config(),
        "profile": "paper",
        "clip-norm": 0.7,
        "personaliser": "grad",
    }
    config = Config.from_run_config(given)
    assert (config.clip_norm, config.personaliser) == (0.7, "grad")
    assert (config.rounds, config.noise_multiplier) == (50, 4.0)
    assert Config.from_run_config(config.to_run_config()) == config


def test_the_practical_profile_changes_nothing() -> None:
    assert Config.from_run_config({"profile": "practical"}) == Config()


@pytest.mark.parametrize("profile", PROFILES)
def test_what_a_profile_sets_keeps_the_rules(profile: str) -> None:
    """Its values are ones that a person might have given."""
    overlay = PROFILES[profile]
    known = {f.name: key_of(f) for f in fields(Config)}
    given = {known[name]: value for name, value in overlay.items()}
    assert Config.from_run_config(given) == replace(Config(), **overlay)


def test_a_clipped_mean_releases_no_sketch() -> None:
    """Nothing bounds what one example adds to it."""
    with pytest.raises(ConfigurationError, match="conflict='raw' or 'debiased'"):
        Config.from_run_config({"unit": "example-in-mean"})
