"""Tracks a run for MLflow: a store of files in the run's folder, whatever the environment says.

``mlflow ui --backend-store-uri runs/latest/mlflow`` shows it, ``mlflow migrate-filestore`` takes it
into a database.
"""

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from regionfed.config import Config
from regionfed.records import RoundRecord, Summary
from server_app.tracking.measures import measures_of
from server_app.tracking.tracker import extra, facts_of

# Read when it is imported. A store of files needs no database, and has to be asked for.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")

with extra("mlflow"):
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

NAME = "mlflow"

_EXPERIMENT = "regionfed"
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow:
    """Keeps one MLflow run below ``mlflow`` in the run's folder; a step is a round."""

    def __init__(self, folder: Path, config: Config, earlier: Sequence[RoundRecord]) -> None:
        del earlier
        self._client = MlflowClient(tracking_uri=(folder / NAME).resolve().as_uri())
        if (kept := self._client.get_experiment_by_name(_EXPERIMENT)) is not None:
            self._run = self._client.search_runs([kept.experiment_id])[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        experiment = self._client.create_experiment(_EXPERIMENT)
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id
        params = [Param(key, str(value)) for key, value in facts_of(config).items()]
        self._client.log_batch(self._run, params=params)

    def round(self, record: RoundRecord) -> None:
        """Log a round's numbers together."""
        now = int(1000 * time.time())
        metrics = [
            Metric(_allowed(measure.tag), measure.value, now, record.round)
            for measure in measures_of(record)
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, summary: Summary) -> None:
        """Say how the run ended."""
        self._client.set_terminated(self._run, _STATUS[summary.status])


def _allowed(tag: str) -> str:
    """Return a name that MLflow takes: a region's may have other signs in it."""
    return re.sub(r"[^\w./ -]", "_", tag)
