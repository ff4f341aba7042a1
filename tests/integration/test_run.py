"""Whole runs: every service its own process, started by the launcher, on a small real model."""

import asyncio
import json
import re
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import pytest

import atoll
from atoll.cli.audit import audit
from atoll.cli.launch.fork import fork
from atoll.cli.launch.launcher import launch
from atoll.config.schema import RunConfig
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.dump import dumps as dump_files
from atoll.runtime.dump import read_dump
from atoll.runtime.errors import AtollError
from atoll.runtime.telemetry import metrics_of
from atoll.wire.info import RunStatus
from atoll.wire.types import Group, Trajectory
from tests.builders import arithmetic_run, run_config
from tests.metrics_page import unexplained

Follow = Callable[[CoordinatorClient], Coroutine[None, None, None]]


Make = Callable[..., RunConfig]
ENDLESS = {"steps": 1000}  # so that what is done to the run cannot come after its end


@pytest.fixture(scope="session")
def make(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A run of six steps of 4 x 4 samples; keyword arguments name sections and override their keys."""
    folder = tmp_path_factory.mktemp("runs")

    def config(name: str, **sections: dict[str, Any]) -> RunConfig:
        tree = {
            "run": {"name": name},
            "warmup": {"steps": 20, "rows_per_step": 32, "source": {"path": assets / "warmup.parquet"}},
            "checkpoint": {"every": 3},
        }
        return run_config(arithmetic_run(assets, folder), tree, sections)

    return config


@pytest.fixture(scope="session")
def whole(make: Make, assets: Path) -> RunConfig:
    """An uninterrupted on-policy run, and nothing is left of it but its folder. The proxy of its environment
    is not connected to."""
    config = make("whole", validation={"sets": [{"name": "sums", "path": assets / "validation.parquet"}]})
    before = set(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as environment, socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            environment.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        assert launch(config, watch, resume=False)
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()
    assert set(psutil.Process().children(recursive=True)) <= before
    return config


async def watch(client: CoordinatorClient) -> None:
    """Lets the run end by itself."""
    await asyncio.Event().wait()


async def step_reached(client: CoordinatorClient, step: int) -> RunStatus:
    status = await client.status()
    while status.state != "training" or status.step < step:
        status = await client.status(status.revision)
    return status


def process(name: str) -> psutil.Process:
    """The service process of that name."""
    return next(p for p in psutil.Process().children() if name in p.cmdline())


def kill(name: str) -> None:
    """SIGKILL to it."""
    process(name).kill()


def rows(config: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]


def curve(config: RunConfig) -> list[tuple[float, ...]]:
    """Of each training step, what would differ if anything had."""
    names = ("step", "critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy")
    return [tuple(row[name] for name in names) for row in rows(config) if "actor/pg_loss" in row]


def dumps(config: RunConfig) -> list[list[Group]]:
    return [read_dump(path)[1] for path in dump_files(config.folder / "dumps")]


def consumed(config: RunConfig) -> Counter[str]:
    return Counter(str(s.id) for groups in dumps(config) for group in groups for s in group.samples)


def check_every_sample_counts_once(config: RunConfig) -> None:
    """In a run that was stopped."""
    steps = json.loads((config.folder / "summary.json").read_text())["steps"]
    assert set(consumed(config).values()) == {1}
    assert len(consumed(config)) == steps * 4 * 4


def test_on_policy_the_trainer_and_the_rollout_agree(whole: RunConfig) -> None:
    training = rows(whole)[1:]
    assert [row["step"] for row in training] == [1, 2, 3, 4, 5, 6]
    for row in training:
        assert row["actor/ratio"] == 1.0
        assert row["actor/pg_clipfrac"] == 0.0
        assert row["rollout_corr/logprob_diff_max"] < 1e-4
        assert row["staleness/max"] == 0
        assert row["training/version"] == row["step"] - 1
        assert row["weights/canary_diff/max"] < 1e-4
        assert row["weights/canary_failed"] == row["weights/failed"] == 0
        assert row["weights/stall_share"] == row["weights/stall_s"] / row["timing_s/step"]
    assert any(row["actor/grad_norm"] > 0 for row in training)
    assert set(consumed(whole).values()) == {1}
    assert len(consumed(whole)) == 6 * 4 * 4


def test_the_page_explains_every_metric(whole: RunConfig) -> None:
    assert unexplained({name for row in rows(whole) for name in metrics_of(row)}) == set()
    assert unexplained(["actor/nothing"]) == {"actor/nothing"}


def test_samples_of_every_step_and_of_validations_can_be_read(whole: RunConfig) -> None:
    """Scores that add up to the metrics, by way of what is on disk."""
    for row in rows(whole)[1:]:
        samples = atoll.read_samples(whole.folder, row["step"])
        assert mean(sample.score for sample in samples) == pytest.approx(row["critic/score/mean"])
        assert {version for sample in samples for version in sample.versions} == {row["training/version"]}
    for step in (0, 6):
        answers = atoll.read_samples(whole.folder, step, set="sums")
        assert {answer.set for answer in answers} == {"sums"}
        assert mean(answer.score for answer in answers) == pytest.approx(rows(whole)[step]["val/sums/avg@1"])
        assert all(
            len(answer.prompt) == answer.num_prompt_tokens for answer in answers
        )  # a token a character
        right = [answer for answer in answers if answer.response == answer.ground_truth]
        assert sum(answer.score for answer in answers) == len(right)


def test_a_run_leaves_its_validation_summary_and_checkpoints(whole: RunConfig) -> None:
    assert {"val/sums/avg@1", "val/sums/pass@1"} <= rows(whole)[0].keys() & rows(whole)[6].keys()
    summary = json.loads((whole.folder / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["checkpoint"] == str(whole.folder / "checkpoints/step-000006")
    assert sorted(p.name for p in (whole.folder / "checkpoints").iterdir()) == ["step-000003", "step-000006"]


def test_a_trainers_log_has_no_warnings_of_megatrons_that_call_for_nothing(whole: RunConfig) -> None:
    log = (whole.folder / "logs" / "actor-0.log").read_text()
    assert "serves actor at" in log
    assert [
        word for word in ("Apex", "DistributedDataParallelConfig", "Params for bucket") if word in log
    ] == []


def test_a_killed_trainer_ends_the_run_and_resuming_gives_the_same_losses(
    make: Make, whole: RunConfig
) -> None:
    alone = {"optimizer": {"learning_rate": 1e-3}, "max_restarts": 0}
    broken = make("broken", run=ENDLESS, trainer=alone)

    async def kill_trainer(client: CoordinatorClient) -> None:
        await step_reached(client, 4)
        kill("actor-0")
        await asyncio.Event().wait()

    with pytest.raises(AtollError, match=r"(?s)actor-0.*SIGKILL.*actor-0\.log"):
        launch(broken, kill_trainer, resume=False)
    assert launch(make("broken", trainer=alone), watch, resume=True)
    assert curve(broken)[:6] == curve(whole)


def test_a_fork_goes_back_to_an_earlier_checkpoint_and_trains_on(make: Make, whole: RunConfig) -> None:
    forked = make("forked", run={"steps": 5})
    assert fork(whole.folder, None, forked.folder) == 6
    shutil.copytree(whole.folder / "checkpoints/step-000003", forked.folder / "checkpoints/step-000003")
    assert launch(forked, watch, resume=True, step=3)
    assert [row["step"] for row in rows(forked)] == [0, 1, 2, 3, 4, 5]
    assert curve(forked)[:3] == curve(whole)[:3]
    names = sorted(path.name for path in (forked.folder / "checkpoints").iterdir())
    assert names == ["left-000006-1", "step-000003", "step-000005"]
    assert audit(forked.folder).exit_code == 0  # nothing is lost, or trained on twice


# A loss in whose process the checkpoint of step 3 is written, and never put in its place.
UNFINISHED = """
import threading

from atoll.trainer import checkpoint
from atoll.trainer.losses import loss

finish = checkpoint._Publication.finish

def unfinished(publication, metadata, results):
    if ".partial-000003" in str(publication.path):
        threading.Event().wait()
    finish(publication, metadata, results)

checkpoint._Publication.finish = unfinished

def ppo_clip(tokens):
    return loss.ppo_clip(tokens)
"""


@pytest.mark.long
def test_a_trainer_killed_while_it_writes_leaves_the_checkpoint_before(
    make: Make, whole: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(UNFINISHED)
    alone = {"optimizer": {"learning_rate": 1e-3}, "max_restarts": 0}
    broken = make("killed-writing", trainer=alone, algorithm={"loss": f"{tmp_path / 'own.py'}:ppo_clip"})
    checkpoints = broken.folder / "checkpoints"

    async def kill_writer(client: CoordinatorClient) -> None:
        await step_reached(client, 3)
        kill("actor-0")
        await asyncio.Event().wait()

    with pytest.raises(AtollError, match=r"(?s)actor-0.*SIGKILL.*actor-0\.log"):
        launch(broken, kill_writer, resume=False)
    assert {path.name for path in checkpoints.iterdir()} == {".partial-000003", "step-000000"}
    assert launch(make("killed-writing", trainer=alone), watch, resume=True)
    assert curve(broken) == curve(whole)


@pytest.fixture(scope="session")
def scorer(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with one label, over the policy's tokenizer."""
    import torch
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("scorer") / "model"
    shutil.copytree(assets / "model", folder)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(assets / "model", num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return folder


@pytest.mark.long
@pytest.mark.rerun_once
def test_neural_models_give_what_transformers_says_of_whole_samples(
    make: Make, assets: Path, scorer: Path
) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    config = make(
        "scored",
        run={"steps": 2},
        reward_model={"path": scorer, "weight": 0.5},
        cost_model={"path": scorer},
        algorithm={"advantage": "rloo", "constraint": {"limit": 100.0}},
    )
    assert launch(config, watch, resume=False)
    model = AutoModelForSequenceClassification.from_pretrained(scorer).eval()
    for row, groups in zip(rows(config)[1:], dumps(config), strict=True):
        scores = [
            model(torch.tensor([[*group.prompt.token_ids, *sample.nodes[0].token_ids]])).logits.item()
            for group in groups
            for sample in group.samples
        ]
        graded = row["reward/exact_match/mean"]
        assert row["critic/score/mean"] == pytest.approx(graded + 0.5 * sum(scores) / 16, abs=1e-5)
        assert row["cost/mean"] == pytest.approx(sum(scores) / 16, abs=1e-5)


@pytest.mark.long
def test_the_dumps_of_a_run_train_the_same_model_again(make: Make, whole: RunConfig) -> None:
    replay = make("replay", run={"mode": "train_only"}, data={"replay": whole.folder / "dumps"})
    assert launch(replay, watch, resume=False)
    assert curve(replay) == curve(whole)


def test_a_killed_replica_costs_no_sample(make: Make) -> None:
    config = make("lost", run=ENDLESS, rollout={"replicas": 2})

    async def kill_replica(client: CoordinatorClient) -> None:
        status = await step_reached(client, 2)
        kill("rollout-1")
        await step_reached(client, status.step + 4)
        await client.stop_run()
        await asyncio.Event().wait()

    assert launch(config, kill_replica, resume=False)
    check_every_sample_counts_once(config)
    log = (config.folder / "logs" / "coordinator.log").read_text()
    # by a call that fails, or by the next process of its name, which may register while the call is retried
    assert re.search(r"rollout-1 is (unhealthy: Rollout\.|lost: its lease ended|lost: a later process)", log)


@pytest.mark.long
def test_a_killed_reward_service_is_started_again_and_costs_no_sample(make: Make, tmp_path: Path) -> None:
    """It grades in a process of its own, with a function of the user's, and is the only one."""
    (tmp_path / "mine.py").write_text("def right(item): return float(item.response == item.ground_truth)\n")
    graders = [{"name": f"{tmp_path / 'mine.py'}:right"}]
    config = make("regraded", run=ENDLESS, reward={"graders": graders})

    async def kill_reward_service(client: CoordinatorClient) -> None:
        status = await step_reached(client, 2)
        kill("reward-0")
        await step_reached(client, status.step + 4)
        await client.stop_run()
        await asyncio.Event().wait()

    assert launch(config, kill_reward_service, resume=False)
    check_every_sample_counts_once(config)
    log = (config.folder / "logs" / "reward-0.log").read_text()
    assert log.count("serves reward at") == 2
    for groups in dumps(config):
        for group in groups:
            for sample in group.samples:
                assert sample.score == float(sample.text == group.prompt.ground_truth)


# Runs a service as `python` would. The first engine of rollout-1 breaks in the middle of a sequence: of the
# first step, whose groups go to both replicas alike.
BREAKING = """#!{python}
import runpy, sys
from atoll.rollout.engines.local_decoder import Decoder

step, broken = Decoder.step, []

def breaks_once(self, admit):
    if "rollout-1" in sys.argv and self.num_rows > 1 and not broken:
        broken.append(self)
        raise FloatingPointError("broken by the test")
    return step(self, admit)

Decoder.step = breaks_once
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.long
def test_a_replica_whose_engine_dies_comes_back_with_the_weights_and_costs_no_sample(
    make: Make, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(BREAKING.format(python=sys.executable))
    python.chmod(0o755)
    config = make("engine-died", run=ENDLESS, rollout={"replicas": 2, "python": python})

    log = config.folder / "logs" / "rollout-1.log"

    def registered() -> list[str]:
        """Its incarnations."""
        return re.findall(r"registered at \S+ as (\S+)", log.read_text())

    def samples() -> Iterator[tuple[int, Trajectory]]:
        """Those that were trained on, and the version that they are to be of."""
        for number, groups in enumerate(dumps(config)):
            yield from ((number, sample) for group in groups for sample in group.samples)

    async def until_it_generates_again(client: CoordinatorClient) -> None:
        status = await step_reached(client, 1)
        while not any(sample.turns[0].origin.incarnation in registered()[1:] for _, sample in samples()):
            status = await client.status(status.revision)
        await client.stop_run()
        await asyncio.Event().wait()

    assert launch(config, until_it_generates_again, resume=False)
    check_every_sample_counts_once(config)
    broke = "engine restart 1 of 3: the engine failed: FloatingPointError: broken by the test"
    assert log.read_text().count(broke) == 1
    assert len(registered()) == 2
    for number, sample in samples():
        assert {span.version.number for span in sample.nodes[0].spans} == {number}
    assert all(row["rollout_corr/logprob_diff_max"] < 1e-4 for row in rows(config)[1:])


@pytest.mark.long
def test_asynchronous_with_partial_rollouts_keeps_the_bound(make: Make) -> None:
    config = make("async", coordinator={"max_staleness": 2, "partial_rollouts": True})
    assert launch(config, watch, resume=False)
    ages = [row["staleness/max"] for row in rows(config)[1:]]
    assert max(ages) <= 2
    assert max(ages) > 0
    assert set(consumed(config).values()) == {1}


def test_rollout_only_dumps_scored_groups_and_continues_after_its_last_dump(make: Make) -> None:
    config = make("rollouts", run={"steps": 2, "mode": "rollout_only"})
    assert launch(config, watch, resume=False)
    first = {path: path.read_bytes() for path in (config.folder / "dumps").iterdir()}
    assert launch(make("rollouts", run={"steps": 4, "mode": "rollout_only"}), watch, resume=True)
    assert {path: path.read_bytes() for path in first} == first
    assert len(dumps(config)) == 4
    check_every_sample_counts_once(config)
    assert all(len(s.rewards) == 1 for groups in dumps(config) for group in groups for s in group.samples)
    assert not (config.folder / "logs" / "actor-0.log").exists()
