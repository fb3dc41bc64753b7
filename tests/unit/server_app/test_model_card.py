"""The page of an exported model: what the run knows, and no claim that it does not make."""

from typing import Any

import pytest

from regionfed.config import Config
from server_app.model_card import model_card

USAGES = {"intent": "load(folder)", "spelling": "load_and_spell(folder)"}


def facts(**changes: Any) -> dict[str, Any]:
    """Return the facts of a region's model after a finished run."""
    config = Config.from_run_config(changes.pop("settings", {}))
    scores = {"intent": 0.5, "spelling": None, "mean": 0.5}
    return {
        "run": "r1",
        "status": "finished",
        "rounds": 25,
        "region": "UK",
        "alpha": 0.75,
        "rho": 1.25,
        "examples": 6021,
        "scores": {"global": scores, "personalised": {**scores, "intent": 0.625}},
        "privacy": {"mode": "dp", "statement": "(3.995, 1e-05)-DP for somebody."},
        "evaluation": {"release": "noised", "statement": "Sums were noised."},
        "config": config.to_run_config(),
        "versions": {"python": "3.11", "regionfed": "0.1.0"},
        **changes,
    }


def test_a_region_s_page_has_all_of_it() -> None:
    """Formula with its numbers, code, privacy, data, scores and versions."""
    page = model_card(facts(), USAGES)
    for said in (
        "region UK",
        "`theta + alpha_r * theta_r` with alpha_r = 0.75 and rho = 1.25, after 25 rounds",
        "```python\nload(folder)\n```",
        "(3.995, 1e-05)-DP for somebody.",
        "this region has 6,021 examples (its size as released, with noise)",
        "| intent | 50.0 | 62.5 | +12.5 |",
        "| spelling | – | – | – |",
        "Sums were noised.",
        "RegionFed 0.1.0 (python 3.11)",
    ):
        assert said in page
    assert page.startswith("---\nlibrary_name: transformers\n")


@pytest.mark.parametrize(
    ("task", "line", "asked"),
    [
        (
            "text-to-text",
            "pipeline_tag: text2text-generation\n",
            "asked as `task: query`; the tasks are `intent`, `spelling`.",
        ),
        ("labels", "pipeline_tag: token-classification\n", "begin with its name"),
    ],
)
def test_a_page_says_what_its_task_does(task: str, line: str, asked: str) -> None:
    """Hugging Face shows a model by that; of a task of one's own nothing is known."""
    page = model_card(facts(settings={"task": task}), USAGES)
    assert line in page.split("---")[1] and asked in page
    own = model_card(facts(settings={"task": "my_app.task:make_task"}), USAGES)
    assert own.startswith("---\nlibrary_name: transformers\ntags:\n") and asked not in own


@pytest.mark.parametrize("task", ["labels", "my_app.task:make_task"])
def test_a_page_has_the_code_of_each_task_where_they_differ(task: str) -> None:
    """A head's labels are read differently by each; a text is only asked by another name."""
    page = model_card(facts(settings={"task": task}), USAGES)
    assert "with `folder` its path, for each task:" in page
    for name, usage in USAGES.items():
        assert f"### {name}\n\n```python\n{usage}\n```" in page
    one = model_card(facts(settings={"task": task}), {"digit": "load(folder)"})
    assert one.count("```python") == 1 and "###" not in one
    assert model_card(facts(), USAGES).count("```python") == 1


def test_the_global_page_speaks_of_all_regions() -> None:
    """No alpha, no region's table."""
    scores = {"global": {"mean": 0.55, "rrs": 0.5, "worst": "MX"}}
    page = model_card(
        facts(region="global", alpha=None, rho=None, examples=None, scores=scores), USAGES
    )
    assert "Mean over regions 55.0 %, worst region 50.0 % (MX)" in page
    assert "alpha" not in page and "| task |" not in page


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        ({}, "nothing is claimed"),
        ({"mode": "dp", "noise_seeded": True, "statement": "S."}, "does not hold"),
        ({"mode": "dp", "simulated_cohort": True, "statement": "S."}, "not a guarantee"),
    ],
)
def test_what_weakens_the_privacy_is_said_before_it(privacy: dict[str, Any], said: str) -> None:
    """As everywhere else; the statement itself stays word by word."""
    page = model_card(facts(privacy=privacy), USAGES)
    assert said in page
    assert page.find(said) < page.find("S.\n") or not privacy


def test_without_privacy_and_evaluation_nothing_is_made_up() -> None:
    """The size is exact then, and there is no table."""
    none = {"mode": "none", "statement": "Privacy was switched off."}
    page = model_card(
        facts(
            settings={"privacy-mode": "none"},
            privacy=none,
            scores={"global": None, "personalised": None},
            evaluation={"release": "off", "statement": "No score left a region."},
        ),
        USAGES,
    )
    assert "Privacy was switched off." in page and "with noise" not in page
    assert "It was not evaluated." in page and "No score left a region." in page
