"""The audit of a real run finds what its summary says, whatever the personaliser asks for."""

from pathlib import Path

import pytest

from regionfed.config import Config
from regionfed.privacy.ledger import Ledger
from server_app.cli.main import main
from server_app.run import execute


@pytest.mark.parametrize(
    ("personaliser", "queries"), [("residual", 0), ("interp", 2), ("meta", 1), ("dynamic", 2)]
)
def test_ledgers_and_summary_agree(
    personaliser: str,
    queries: int,
    t5_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No region's ledger exceeds what is said; who asks for gradients is charged for them."""
    config = Config.from_run_config(
        {
            "personaliser": personaliser,
            "rounds": 2,
            "rho-every": 2,
            "regions": 2,
            "clients-per-region": 2,
            "examples-per-client": 60,
            "size-noise-multiplier": 5.0,
            "user-steps": 0,
            "model": str(t5_folder),
            "trainable": "final_layer_norm",
            "workers": 1,
            "run-dir": str(tmp_path),
        }
    )
    summary = execute(config, say=lambda _: None, report=False)
    assert summary.status == "finished"
    run = Path(summary.paths["summary"]).parent
    assert main(["privacy", "audit", "--run", str(run)]) == 0
    assert "they agree" in capsys.readouterr().out
    spent = []
    for name, region in summary.regions.items():
        ledger = Ledger(run / "regions" / name / "ledger.jsonl", config.delta, {})
        spent.append(ledger.epsilon("train"))
        asked = sum(event.release == "personal gradient" for event in ledger.events)
        assert asked == {"grad": 0, "interp": 2, "meta": 1}.get(region.strategy or "", 0)
        assert asked <= queries
    assert summary.privacy.epsilon == pytest.approx(max(spent))
    assert summary.privacy.epsilon <= config.target_epsilon
