"""Judges a run of scripted agents: every token that the engine drew is in the consumed dumps, once, behind
the context that the policy saw."""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from atoll.cli.launch.launcher import launch
from atoll.config.schema import RunConfig
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.dump import dumps, read_dump
from atoll.wire.types import Trajectory
from tests.builders import run_config
from tests.gateway.agent_runs import ROOT, config, engine_log
from tests.gateway.scripts import scripts

QUESTION = "1+2="
MORE = ("And 5+6?", "And 7+8?")
SAMPLES = 2  # of each row
TOLERANCE = 1e-4  # nats

Log = Sequence[Mapping[str, Any]]  # turns with id, ids and end


@dataclass(frozen=True)
class Outcome:
    turns: Mapping[str, Sequence[int]]  # of each session, by client
    branches: Mapping[str, Sequence[int]]  # beside the first
    num_tokens: int  # that the policy produced
    max_difference: float  # of log-probabilities, in nats


def check_run(
    folder: Path,
    family: str,
    clients: Sequence[str],
    agent: str,
    *,
    python: Path | None = None,
    thinking: str = "keep",
) -> Outcome:
    """Runs each client through scripts of the family's call format, one step with learning rate 0. Raises
    AssertionError if a token is lost, altered or there twice, or if a log-probability is not the model's."""
    rows = [
        (client, f"{QUESTION}\nSCRIPT: {json.dumps(script)}")
        for client in clients
        for script in scripts(family, client)
    ]
    write_rows(folder / "rows.jsonl", rows)
    local = {"slots": 16, "max_length": 16384}
    tree = one_step(
        folder, family, agent, len(rows), rollout={"local": local}, gateway={"thinking": thinking}
    )
    tree["agents"][0] |= {"python": python} if python else {}
    return judge(run_config(tree), [client for client, _ in rows], lambda: engine_log(folder))


def one_step(folder: Path, family: str, agent: str, num_rows: int, **tables: Any) -> dict[str, Any]:
    """The config of a run of one step over all rows, with learning rate 0."""
    tree = config(
        folder,
        family,
        agent,
        run={"steps": 1},
        coordinator={
            "prompts_per_step": num_rows,
            "samples_per_prompt": SAMPLES,
            "max_sample_attempts": 1,
            "max_dropped_share": 0.0,
        },
        trainer={"optimizer": {"learning_rate": 0.0}},
        **tables,
    )
    file, function = agent.split(":")
    tree["agents"] = [{"name": "tested", "function": f"{ROOT}/tests/gateway/{file}:{function}"}]
    return tree


def judge(run: RunConfig, clients: Sequence[str], read_log: Callable[[], Log]) -> Outcome:
    """Launches the run; `clients` by row. Raises AssertionError as check_run does."""
    assert launch(run, until_ended, resume=False)
    samples = consumed(run)
    assert len(samples) == SAMPLES * len(clients)
    check_log(read_log(), samples)
    difference = max(check_logprobs(run.model.path, samples), trainer_difference(run))
    assert difference < TOLERANCE, f"got log-probabilities {difference} nats apart, expected {TOLERANCE}"
    turns, branches = defaultdict(list), defaultdict(list)
    for sample in samples:
        client = clients[sample.id.group.prompt]
        turns[client].append(len(sample.turns))
        branches[client].append(num_branches(sample))
    num_tokens = sum(sample.num_produced for sample in samples)
    return Outcome(turns, branches, num_tokens, difference)


def write_rows(path: Path, rows: Sequence[tuple[str, str]]) -> None:
    """Each with its client, and what the user asks it first."""
    records = [
        {
            "data_source": "scripted",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": "46"},
            "extra_info": {"index": number, "client": client, "more": json.dumps(MORE)},
        }
        for number, (client, question) in enumerate(rows)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


async def until_ended(client: CoordinatorClient) -> None:
    await asyncio.Event().wait()  # cancelled at the run's end


def consumed(run: RunConfig) -> list[Trajectory]:
    groups = [group for path in dumps(run.folder / "dumps") for group in read_dump(path)[1]]
    return [sample for group in groups for sample in group.samples]


def check_log(log: Log, samples: Sequence[Trajectory]) -> None:
    """Turns with their tokens, as multisets. Health probes and aborted turns do not count."""
    drawn = [
        (turn["id"], tuple(turn["ids"]))
        for turn in log
        if not turn["id"].startswith("probe-") and turn["end"] != "abort"
    ]
    held = [
        (
            f"{sample.id}/{sample.attempt}/{turn.number}/{turn.branch}",
            tuple(sample.nodes[turn.node].token_ids.tolist()),
        )
        for sample in samples
        for turn in sample.turns
    ]
    assert Counter(held) == Counter(drawn)
    for sample in samples:
        trained = {index for index, node in enumerate(sample.nodes) if node.loss_mask.any()}
        assert Counter(turn.node for turn in sample.turns) == Counter(trained)
        assert all(sample.nodes[index].loss_mask.all() for index in trained)


def check_logprobs(model_folder: Path, samples: Sequence[Trajectory]) -> float:
    """The greatest difference from an independent forward pass over each leaf's path, in nats."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    greatest = 0.0
    for sample in samples:
        for leaf in leaves(sample):
            path = path_to(sample, leaf)
            ids = np.concatenate([sample.nodes[index].token_ids for index in path])
            mask = np.concatenate([sample.nodes[index].loss_mask for index in path])
            recorded = np.concatenate([sample.nodes[index].logprobs for index in path])
            with torch.no_grad():
                logits_TV = model(torch.from_numpy(ids).long()[None]).logits[0, :-1]
            chosen = torch.from_numpy(ids[1:]).long()[:, None]
            own = logits_TV.log_softmax(-1).gather(1, chosen)[:, 0].numpy()
            greatest = max(greatest, float(np.abs(own - recorded[1:])[mask[1:]].max()))
    return greatest


def trainer_difference(run: RunConfig) -> float:
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    name = "rollout_corr/logprob_diff_max"
    return max(row[name] for row in map(json.loads, lines) if name in row)


def path_to(sample: Trajectory, node: int) -> list[int]:
    """Node indices from the root on."""
    path = []
    while node >= 0:
        path.append(node)
        node = sample.nodes[node].parent
    return path[::-1]


def leaves(sample: Trajectory) -> list[int]:
    return sorted(set(range(len(sample.nodes))) - {node.parent for node in sample.nodes})


def num_branches(sample: Trajectory) -> int:
    """Beside the first."""
    return len(leaves(sample)) - 1
