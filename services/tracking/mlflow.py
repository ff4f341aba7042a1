"""MLflow. MLFLOW_TRACKING_URI and its other variables say where the server or the store is."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from atoll.config.load import flatten
from atoll.tracking.tracker import SampleRow, TrackedRun

ID_TAG = "atoll.run"  # MLflow gives runs ids of its own
MAX_METRICS = 1000  # per call
MAX_PARAMS = 100
MAX_PARAM = 500  # characters that every version of MLflow takes


class MlflowTracker:
    def start(self, run: TrackedRun) -> None:
        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(run.project)
        where = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        if found := self._client.search_runs([where], f"tags.`{ID_TAG}` = '{run.id}'"):
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._run = self._client.create_run(where, tags={ID_TAG: run.id}, run_name=run.name).info.run_id
            params = [Param(name, str(value)[:MAX_PARAM]) for name, value in flatten(run.config)]
            for first in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(self._run, params=params[first : first + MAX_PARAMS])
        self._client.log_dict(self._run, dict(run.config), "config.json")  # params cannot change

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        entries = [Metric(_allowed(name), value, int(1000 * time), step) for name, value in metrics.items()]
        for first in range(0, len(entries), MAX_METRICS):
            self._client.log_batch(self._run, metrics=entries[first : first + MAX_METRICS])

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        text = json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False)
        self._client.log_text(self._run, text, f"samples/step-{step:06d}.json")

    def finish(self) -> None:
        self._client.set_terminated(self._run)


def _allowed(name: str) -> str:
    """MLflow refuses other characters, such as the @ of avg@4."""
    return re.sub(r"[^\w\-. :/]", "-", name)
