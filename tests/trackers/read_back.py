"""Prints a run as a tracker's own reader returns it: `read_back.py TRACKER FOLDER`, in `.venv-tracking`.

JSON of the run's ids, its learning rate in the config, its samples' texts, and [step, value] of the metrics
`critic/score/mean` and `val/toy/avg@4`, in the order in which they were written.
"""

import json
import sys
from pathlib import Path
from typing import Any

SCORE, VALIDATION = "critic/score/mean", "val/toy/avg@4"


def tensorboard(folder: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()

    def text(tag: str) -> str:
        return events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()

    config = json.loads(text("config").removeprefix("```json\n").removesuffix("\n```"))
    return {
        "ids": [],  # the folder is the run
        "rate": config["trainer"]["optimizer"]["learning_rate"],
        "samples": text("samples"),
        **{name: [[e.step, e.value] for e in events.Scalars(name)] for name in (SCORE, VALIDATION)},
        "times": [event.wall_time for event in events.Scalars(SCORE)],
    }


def wandb(folder: Path) -> dict[str, Any]:
    from swanlab.converter.wb.wbdatastore import (
        WBDataStoreReader,  # wandb's own reader is a part of its binary
    )
    from wandb.proto.wandb_internal_pb2 import Record

    ids, rate, rows = [], None, []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        reader = WBDataStoreReader()
        reader.open(path)
        while (data := reader.scan()) is not None:
            record = Record.FromString(data)
            if record.HasField("run"):
                ids.append(record.run.run_id)
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                rate = config["trainer"]["optimizer"]["learning_rate"]
            if record.HasField("history"):
                items = record.history.item
                rows.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})
    tables = [row["samples.path"] for row in rows if "samples.path" in row]
    [table] = list(folder.rglob(Path(tables[-1]).name))
    return {
        "ids": ids,
        "rate": rate,
        "samples": table.read_text(),
        **{name: [[row["step"], row[name]] for row in rows if name in row] for name in (SCORE, VALIDATION)},
        "times": [row["_timestamp"] for row in rows if SCORE in row],
    }


def mlflow(folder: Path) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient()
    [experiment] = client.search_experiments(filter_string="name = 'sums'")
    [run] = client.search_runs([experiment.experiment_id])

    def history(name: str) -> list[Any]:
        return sorted(client.get_metric_history(run.info.run_id, name), key=lambda metric: metric.timestamp)

    [artifact] = client.list_artifacts(run.info.run_id, "samples")
    return {
        "ids": [run.data.tags["atoll.run"]],
        "rate": float(run.data.params["trainer.optimizer.learning_rate"]),
        "samples": Path(client.download_artifacts(run.info.run_id, artifact.path, str(folder))).read_text(),
        SCORE: [[metric.step, metric.value] for metric in history(SCORE)],
        VALIDATION: [[metric.step, metric.value] for metric in history(VALIDATION.replace("@", "-"))],
        "times": [metric.timestamp / 1000 for metric in history(SCORE)],
    }


def swanlab(folder: Path) -> dict[str, Any]:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    scalars, texts = [], []
    paths = sorted(folder.glob("swanlab/run-*"))
    for path in paths:
        reader = DataStoreReader()
        reader.open(next(path.glob("*.swanlab")))
        while (data := reader.scan()) is not None:
            record = Record.FromString(data)
            if record.HasField("scalar"):
                scalars.append(record.scalar)
            if record.HasField("media"):
                texts += [(path, item) for item in record.media.value.items]
    config = yaml.safe_load((paths[-1] / "files" / "config.yaml").read_text())
    return {
        "ids": [path.name.rpartition("-")[2] for path in paths],
        "rate": config["trainer"]["value"]["optimizer"]["learning_rate"],
        "samples": "".join(
            item.caption + (path / "media" / "text" / item.filename).read_text() for path, item in texts
        ),
        SCORE: [[s.step, s.value.number] for s in scalars if s.key == SCORE],
        VALIDATION: [[s.step, s.value.number] for s in scalars if s.key == VALIDATION],
    }


def trackio(folder: Path) -> dict[str, Any]:
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    runs = list(Api().runs("sums"))
    logs = SQLiteStorage.get_logs("sums", runs[0].name)
    return {
        "ids": [run.name for run in runs],
        "rate": runs[0].config["trainer"]["optimizer"]["learning_rate"],
        "samples": json.dumps([row["samples"] for row in logs if "samples" in row]),
        **{name: [[row["step"], row[name]] for row in logs if name in row] for name in (SCORE, VALIDATION)},
    }


if __name__ == "__main__":
    name, run = sys.argv[1:]
    print(json.dumps(globals()[name](Path(run))))
