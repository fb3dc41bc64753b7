"""Acceptance: the same job on real queries, by configuration alone."""

import json
import os
from pathlib import Path

import pytest

from regionfed.config import Config
from server_app.run import execute

SHARED = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
REAL = Path(os.environ.get("REGIONFED_DATA", SHARED))


@pytest.mark.skipif(not (REAL / "esci_rows").is_dir(), reason="no real queries on this machine")
@pytest.mark.slow
def test_the_same_job_runs_on_real_queries(tmp_path: Path) -> None:
    config = Config.from_run_config(
        {
            "dataset": "esci",
            "data-path": str(REAL),
            "rounds": 2,
            "rho-every": 2,
            "evaluate-every": 2,
            "evaluation-privacy": "panel",
            "run-dir": str(tmp_path),
        }
    )
    summary = execute(config)
    assert summary.status == "finished"
    assert summary.rounds == 2
    assert not summary.failures
    written = json.loads((tmp_path / "latest" / "summary.json").read_text())
    assert len(written["regions"]) == 8
    assert 0.0 < written["privacy"]["epsilon"] <= 4.0
    for region in written["regions"].values():
        assert region["examples"] > 0
        assert set(region["global"]) == {"intent", "spelling", "entities", "mean"}
        assert all(0.0 <= score <= 1.0 for score in region["personalised"].values())
