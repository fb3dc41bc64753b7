"""The page of a run: all runs have one, and it hides nothing and loads nothing."""

import json
import re
from dataclasses import fields
from html.parser import HTMLParser

import pytest

from regionfed.errors import RunError
from regionfed.records import (
    EvaluationSummary,
    Failure,
    PrivacySummary,
    RegionRecord,
    RoundRecord,
    Summary,
    mean_and_rrs,
    with_mean,
)
from server_app.report import write_report
from server_app.report.__main__ import main
from server_app.report.report import banners, cell, table_of_regions
from server_app.run_folder import RunFolder, append_jsonl, plain, write_json_atomic

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Checks that tags are balanced and collects what a browser would load or show."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.tags, self.loads, self.words = [], [], set(), [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        given = dict(attrs)
        self.ids += [given["id"]] if "id" in given else []
        self.loads += [given[key] for key in ("src", "href", "xlink:href") if key in given]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def make_run(root, *, names=("north", "south"), rounds=3, evaluated=True, **changes):
    """Write what a run of so many regions and rounds writes; `changes` go to its summary."""
    folder = RunFolder.create(root, "run")
    scores = [with_mean({"intent": 0.5 + i / 100, "spelling": None}) for i in range(len(names))]
    better = [with_mean({"intent": 0.6 + i / 100, "spelling": None}) for i in range(len(names))]
    regions = {
        name: RegionRecord(
            examples=100,
            conflict=0.5,
            alpha=0.7,
            rho=0.1,
            strategy="Grad",
            reason="conflict below the threshold",
            global_=scores[i] if evaluated else None,
            personalised=better[i] if evaluated else None,
        )
        for i, name in enumerate(names)
    }
    global_ = mean_and_rrs({n: (r.global_ or {}).get("mean") for n, r in regions.items()})
    personal = mean_and_rrs({n: (r.personalised or {}).get("mean") for n, r in regions.items()})
    for number in range(1, rounds + 1):
        score = {"global_": global_, "personalised": personal} if evaluated else {}
        record = RoundRecord(
            number, rounds, names, loss=1 / number, regions=regions, epsilon=number, **score
        )
        append_jsonl(folder.metrics, record)
    summary = Summary(
        "finished",
        "",
        rounds,
        0,
        {"rounds": rounds, "privacy": {"mode": "example"}},
        {"torch": "2.13.0"},
        global_,
        personal,
        regions,
        PrivacySummary(
            "example",
            3.99,
            1e-5,
            unit="one example",
            sampling="Poisson",
            neighbouring="add or remove",
            accountant="PLD",
            noise_multiplier=1.1,
            clip_norm=0.5,
            events=[{"name": "update", "released_by": "region", "count": 3, "z": 1.1}],
            statement="At most epsilon 3.99.",
        ),
        EvaluationSummary("noised" if evaluated else "off", 0.5 if evaluated else None),
        (),
        60.0,
        {},
    )
    write_json_atomic(folder.summary, {**plain(summary), **plain(changes)})
    return folder


def test_users_own_models_are_told_where_they_were_scored(tmp_path):
    regions = {"north": RegionRecord(user=with_mean({"intent": 0.716}))}
    assert "sers' own" not in page_of(make_run(tmp_path / "without")).text
    own = {"mean": 0.727, "rrs": 0.716, "worst": "north"}
    text = page_of(make_run(tmp_path / "with", user=own, regions=regions)).text
    assert "users' own models: 72.7 %" in text
    assert "Users' own" in text and "71.6" in text


def page_of(folder):
    return Page(write_report(folder.path).read_text(encoding="utf-8"))


def test_the_page_tells_the_result_and_what_its_epsilon_means(tmp_path):
    text = page_of(make_run(tmp_path)).text
    for said in (
        "finished",
        "60.5",  # personalised mean over the regions
        "60.0",  # and the worst region's
        "+10.0 points",
        "3.99",
        "1e-5",
        "one example",
        "Poisson",
        "add or remove",
        "PLD",
        "conflict below the threshold",
        "released under noise",
        "Released by",
        "privacy.mode",
        "2.13.0",
        "None recorded.",
    ):
        assert said in text, said


CASES = {
    "one round": {"rounds": 1},
    "no evaluation": {"evaluated": False},
    "one region": {"names": ("solo",)},
    "sixty regions": {"names": tuple(f"region-{i}" for i in range(60))},
    "no region": {"names": ()},
    "no round": {"rounds": 0},
    "a region that never answered": {
        "regions": {"north": None, "south": RegionRecord(reason="never answered")}
    },
    "nulls everywhere": {
        field.name.rstrip("_"): None for field in fields(Summary) if field.name != "rounds"
    },
    "null privacy fields": {"privacy": PrivacySummary("client")},
    "many failures": {"failures": [Failure("north", i, "no answer") for i in range(500)]},
}


@pytest.mark.parametrize("case", CASES)
def test_every_run_has_a_page_that_loads_nothing(tmp_path, case):
    page = page_of(make_run(tmp_path, **CASES[case]))
    assert not page.tags & {"script", "link", "img", "iframe", "object"}
    assert all(target.startswith("#") for target in page.loads)
    assert len(page.ids) == len(set(page.ids))
    source = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|url\((?!#)", source)
    assert not {"nan", "None", "Undefined", "[]"} & {word.strip() for word in page.words}


def test_the_same_files_give_the_same_bytes(tmp_path):
    folder = make_run(tmp_path)
    first = write_report(folder.path).read_bytes()
    assert write_report(folder.path).read_bytes() == first


def test_names_and_reasons_are_shown_not_run(tmp_path):
    nasty = "<script>alert('x')</script>&amp;\"{{ 7 * 7 }}"
    folder = make_run(
        tmp_path,
        names=(nasty, "south"),
        status="failed",
        reason=nasty,
        config={nasty: nasty},
        failures=[Failure(nasty, 1, nasty, nasty)],
    )
    page = page_of(folder)
    assert "script" not in page.tags
    assert page.text.count(nasty) >= 6


def test_scores_are_taken_from_the_rounds_while_there_is_no_summary(tmp_path):
    folder = make_run(tmp_path)
    folder.summary.unlink()
    text = page_of(folder).text
    assert "This run has no summary" in text
    assert "60.5" in text and "north" in text


def test_a_summary_alone_is_enough(tmp_path):
    folder = make_run(tmp_path)
    folder.metrics.unlink()
    assert "60.5" in page_of(folder).text


def test_an_empty_or_damaged_folder_is_named(tmp_path):
    with pytest.raises(RunError, match="nothing to report in"):
        write_report(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(RunError, match="cannot read"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("summary", "titles"),
    [
        ({"status": "finished", "privacy": {"mode": "example"}}, []),
        ({"status": "finished", "privacy": {"mode": "none"}}, ["No differential privacy"]),
        (
            {"status": "failed", "reason": "why", "privacy": {"noise_seeded": True}},
            ["This run failed", "The noise was seeded for a test"],
        ),
        (
            {"status": "stopped", "privacy": {"simulated_cohort": True, "epsilon": 1.0}},
            ["This run was stopped", "Simulated cohort"],
        ),
        ({}, ["This run has no summary"]),
    ],
)
def test_what_nobody_may_overlook_is_said_first(summary, titles):
    assert [banner.title for banner in banners(summary)] == titles


def test_without_privacy_no_epsilon_is_shown(tmp_path):
    text = page_of(make_run(tmp_path, privacy=PrivacySummary("none"))).text
    assert "No differential privacy" in text
    assert "no noise, no guarantee" in text
    assert "ε 3.99" not in text


def test_the_best_region_comes_first_and_one_without_a_score_last():
    regions = {
        "low": {"personalised": {"mean": 0.1}},
        "never": {},
        "zero": {"personalised": {"mean": 0.0}},
        "global-only": {"global": {"mean": 0.05}},
        "high": {"personalised": {"mean": 0.9}},
    }
    names = [region.name for region in table_of_regions({"regions": regions}, [])]
    assert names == ["high", "low", "global-only", "zero", "never"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        ("", "–"),
        ([], "–"),
        (True, "yes"),
        (False, "no"),
        (0, "0"),
        (12345, "12\u202f345"),
        (0.1 + 0.2, "0.3"),
        (1e-5, "1e-5"),
        (["a", 1], "a, 1"),
        ({}, "{}"),
    ],
)
def test_a_cell_reads_like_text(value, shown):
    assert cell(value) == shown


def test_the_command_renders_again_and_says_where(tmp_path, monkeypatch, capsys):
    folder = make_run(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    assert capsys.readouterr().out.strip() == str(folder.report)
    assert main(["nothing-of-that-name"]) == 1
    assert "newest first: run" in capsys.readouterr().err


def test_the_summary_holds_what_is_promised(tmp_path):
    summary = json.loads(make_run(tmp_path).summary.read_text())
    assert {"status", "reason", "rounds", "seed", "config", "versions", "global"} <= set(summary)
    assert {"mean", "rrs"} <= set(summary["global"]) & set(summary["personalised"])
    assert {"examples", "conflict", "alpha", "rho", "strategy", "reason", "global"} <= set(
        summary["regions"]["north"]
    )
    assert summary["regions"]["north"]["personalised"] == {
        "intent": 0.6,
        "spelling": None,
        "mean": 0.6,
    }
    assert {"mode", "epsilon", "delta", "unit", "sampling", "neighbouring", "accountant"} <= set(
        summary["privacy"]
    )
