"""Reads a run's input files before its services are needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.config.schema import RunConfig, SamplingConfig, SourceConfig, ValidationSetConfig
from atoll.coordinator.data.datasets import (
    Pair,
    PromptSource,
    SupervisedSource,
    drop_overlong,
    drop_overlong_prompts,
    read_pairs,
    read_prompts,
)
from atoll.coordinator.supervised import HeldOutSet
from atoll.coordinator.validation import ValidationSet
from atoll.runtime.dump import dumps_by_step
from atoll.runtime.errors import UserError
from atoll.runtime.model_spec import read_spec
from atoll.runtime.rendering import Renderer
from atoll.wire.types import Prompt, Sampling


@dataclass(frozen=True, slots=True)
class RunData:
    renderer: Renderer
    sampling: Sampling  # of training
    prompts: PromptSource | None = None  # not in a replay and in supervised
    replay: Sequence[Path] = ()  # dumps, one for each step of the run
    warmup: SupervisedSource | None = None
    rows: SupervisedSource | None = None  # in supervised, like the held-out ones
    validation_sets: Sequence[ValidationSet] = ()
    held_out: Sequence[HeldOutSet] = ()


def read_data(config: RunConfig) -> RunData:
    """Raises UserError that names file, row and field of the first bad row."""
    renderer = Renderer(config.model.path)
    sampling = _sampling(config.rollout.sampling, renderer, config.run.seed)
    if config.run.mode == "supervised":
        return RunData(renderer, sampling, rows=_rows(config, renderer), held_out=_held_out(config, renderer))
    warms_up = config.run.mode != "rollout_only" and config.warmup.steps
    generates = config.run.mode in ("train", "rollout_only")
    return RunData(
        renderer,
        sampling,
        prompts=None if config.data.replay else _prompt_source(config, renderer),
        replay=_replay(config.data.replay, config.run.steps) if config.data.replay else (),
        warmup=_warmup_rows(config.warmup.source, renderer, config.run.seed) if warms_up else None,
        validation_sets=_validation_sets(config, renderer) if generates else (),
    )


def _replay(folder: Path, steps: int) -> list[Path]:
    paths = dumps_by_step(folder)
    wanted = range(1, steps + 1)
    if not paths.keys() >= set(wanted):
        held, needed = f"{len(paths)} dumps", "as many"
        if len(paths) >= steps:
            held, needed = f"dumps of steps {min(paths)} to {max(paths)}", f"those of steps 1 to {steps}"
        raise UserError(
            f"data.replay = {folder} holds {held}, run.steps = {steps} needs {needed}: lower run.steps, or "
            'use dumps of a longer run with coordinator.dump = "all" (runs/NAME/dumps)'
        )
    return [paths[step] for step in wanted]


def _warmup_rows(source: SourceConfig | None, renderer: Renderer, seed: int) -> SupervisedSource:
    assert source is not None  # by a rule of the config
    return SupervisedSource([read_pairs(source.path, renderer)], [1.0], seed, shuffle=True)


def _rows(config: RunConfig, renderer: Renderer) -> SupervisedSource:
    data = config.data
    rows = [_pairs(config, source.path, renderer) for source in data.train]
    weights = [source.weight for source in data.train]
    return SupervisedSource(rows, weights, config.run.seed, data.shuffle)


def _held_out(config: RunConfig, renderer: Renderer) -> list[HeldOutSet]:
    return [
        HeldOutSet(entry.name, _pairs(config, entry.path, renderer)[: entry.max_prompts])
        for entry in config.validation.sets
    ]


def _pairs(config: RunConfig, path: Path, renderer: Renderer) -> list[Pair]:
    """The rows with their answers that the model can take as a whole."""
    limit = read_spec(config.model.path).max_positions
    pairs = read_pairs(path, renderer)
    return drop_overlong(
        path,
        pairs,
        [len(prompt) + len(response) for prompt, response in pairs],
        limit,
        config.data.overlong_prompts,
        what="prompt and response",
        expected=f"the model's max_position_embeddings = {limit}; shorten it",
    )


def _prompt_source(config: RunConfig, renderer: Renderer) -> PromptSource:
    data, run = config.data, config.run
    return PromptSource(
        data.train,
        renderer,
        run=run.name,
        seed=run.seed,
        shuffle=data.shuffle,
        longest=config.longest_prompt,
        overlong=data.overlong_prompts,
    )


def _validation_sets(config: RunConfig, renderer: Renderer) -> list[ValidationSet]:
    return [
        ValidationSet(
            name=entry.name,
            prompts=_validation_prompts(config, entry, renderer),
            num_samples=entry.num_samples,
            sampling=_sampling(entry.sampling, renderer, config.run.seed),
        )
        for entry in config.validation.sets
    ]


def _validation_prompts(
    config: RunConfig, entry: ValidationSetConfig, renderer: Renderer
) -> tuple[Prompt, ...]:
    prompts = read_prompts(entry.path, renderer, config.run.name, agent=entry.agent)[: entry.max_prompts]
    overlong = config.data.overlong_prompts
    return tuple(drop_overlong_prompts(entry.path, prompts, config.longest_prompt, overlong))


def _sampling(config: SamplingConfig, renderer: Renderer, seed: int) -> Sampling:
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop_token_ids=renderer.stop_ids,
        stop=config.stop,
        seed=seed,
    )
