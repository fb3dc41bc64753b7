"""Flower's protocol over our accountant: the same numbers, and nothing forgotten."""

import json
import math

import pytest
from flwr.serverapp import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyAccountant,
    PrivacyConfig,
    RdpAccountant,
    SamplingMethod,
)
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from regionfed.errors import PrivacyError
from regionfed.privacy.flower import FlowerAccountant

ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
POISSON = PrivacyConfig(1e-5, 1000, ADD, SamplingMethod.POISSON, max_epsilon=0.7)
EVERYONE = PrivacyConfig(1e-5, 1000, ADD, SamplingMethod.NO_AMPLIFICATION)
EVENT = GaussianPrivacyEvent(4.0, 100, 1000)


def spent(rounds: int = 50, config: PrivacyConfig = POISSON) -> PrivacyAccountant:
    accountant: PrivacyAccountant = FlowerAccountant(config)
    accountant.compose(EVENT, rounds)
    return accountant


def test_the_published_setting() -> None:
    """0.684 by PLD, below Flower's own RDP; 8.6 where everyone is in every round."""
    mine, theirs = spent(), RdpAccountant(POISSON)
    theirs.compose(EVENT, 50)
    assert mine.get_epsilon(1e-5) == pytest.approx(0.684, abs=5e-4)
    assert mine.get_epsilon(1e-5) < theirs.get_epsilon(1e-5)
    assert spent(config=EVERYONE).get_epsilon(1e-5) == pytest.approx(8.6, abs=0.05)
    assert mine.get_delta(mine.get_epsilon(1e-5)) == pytest.approx(1e-5, rel=0.05)


def test_what_is_spent_is_said_in_flower_s_words() -> None:
    """Method, delta, number of releases; nothing released costs nothing."""
    told = spent().get_privacy_spent()
    assert (told.delta, told.num_releases, told.accounting_method) == (1e-5, 50, "pld")
    assert FlowerAccountant(POISSON).get_privacy_spent().epsilon == 0.0


def test_it_says_beforehand_what_would_be_too_much() -> None:
    """And changes nothing by that."""
    accountant = spent()
    assert not accountant.would_exceed(EVENT)
    assert accountant.would_exceed(EVENT, count=50)
    assert accountant.would_exceed(EVENT, max_epsilon=0.5)
    assert accountant.num_releases == 50
    with pytest.raises(PrivacyError, match="max_epsilon"):
        spent(config=EVERYONE).would_exceed(EVENT)


def test_a_state_goes_through_json_and_back() -> None:
    """The same epsilon; another configuration or a damaged state is refused whole."""
    state = json.loads(json.dumps(spent().state_dict()))
    again = FlowerAccountant(POISSON)
    again.load_state_dict(state)
    assert again.get_epsilon(1e-5) == spent().get_epsilon(1e-5) and again.num_releases == 50
    with pytest.raises(PrivacyError, match="another config"):
        FlowerAccountant(EVERYONE).load_state_dict(state)
    for damaged in ([[4.0, 0.1, 0]], [[4.0, 0.1]], [[math.nan, 0.1, 1]], None):
        with pytest.raises(PrivacyError):
            again.load_state_dict({**state, "releases": damaged})
    assert again.num_releases == 50


def test_what_cannot_be_accounted_is_refused() -> None:
    """Sampling without replacement, another population, no release at all."""
    replace_one = NeighboringRelation.REPLACE_ONE
    with pytest.raises(PrivacyError, match="without-replacement"):
        FlowerAccountant(PrivacyConfig(1e-5, 1000, replace_one, SamplingMethod.WITHOUT_REPLACEMENT))
    with pytest.raises(PrivacyError, match="of 99 clients"):
        spent().compose(GaussianPrivacyEvent(4.0, 9, 99))
    with pytest.raises(PrivacyError, match="1 or more"):
        spent().compose(EVENT, 0)


def test_flower_s_strategy_takes_it() -> None:
    """Where Flower offers an accountant, ours can stand."""
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(), noise_multiplier=4.0, clipping_norm=1.0, num_sampled_clients=100,
        accountant=spent(config=EVERYONE),
    )  # fmt: skip
    assert strategy.accountant is not None
    assert strategy.accountant.get_privacy_spent().accounting_method == "pld"
