"""Reads a run's input files before its services are needed."""

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from atoll.config.schema import (
    DatasetConfig,
    RunConfig,
    SamplingConfig,
    SourceConfig,
    TokenLimit,
    ValidationSetConfig,
)
from atoll.coordinator.data.conversations import SupervisedSequence
from atoll.coordinator.data.dataset_rows import Dataset, read_rows, read_supervised_rows
from atoll.coordinator.data.datasets import (
    PromptSource,
    SupervisedSource,
    drop_overlong_prompts,
    read_prompts,
    read_sequences,
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
        rows = _supervised_source(config, config.data.train, renderer, config.data.shuffle)
        return RunData(renderer, sampling, rows=rows, held_out=_held_out(config, renderer))
    generates = config.run.mode in ("train", "rollout_only")
    return RunData(
        renderer,
        sampling,
        prompts=None if config.data.replay else _prompt_source(config, renderer),
        replay=_replay(config.data.replay, config.run.steps) if config.data.replay else (),
        warmup=_supervised_source(config, [_warmup_source(config)], renderer) if _warms_up(config) else None,
        validation_sets=_validation_sets(config, renderer) if generates else (),
    )


def data_checks(
    config: RunConfig, renderer: Renderer | None, max_rows: int
) -> Iterator[tuple[str, Callable[[], Sized]]]:
    """For each dataset its setting, and a function that reads its first rows as `read_data` reads all of them
    and raises the same errors. Without a renderer, rows are neither rendered nor counted in tokens."""
    data, mode = config.data, config.run.mode
    check = partial(_check_dataset, config, renderer, max_rows)
    if data.replay:
        yield f"data.replay {data.replay}", partial(_replay, data.replay, config.run.steps)
    else:
        for source in data.train:
            yield f"data.train {source.path}", partial(check, source, mode == "supervised")
    for entry in config.validation.sets if mode != "train_only" else ():
        yield f"validation.sets {entry.path}", partial(check, entry, mode == "supervised")
    if _warms_up(config):
        source = _warmup_source(config)
        yield f"warmup.source {source.path}", partial(check, source, True)


def _check_dataset(
    config: RunConfig, renderer: Renderer | None, max_rows: int, source: DatasetConfig, with_answers: bool
) -> Sized:
    if renderer is None:
        read = read_supervised_rows if with_answers else read_rows
        return read(_dataset(config, source, max_rows))
    return (_sequences if with_answers else _prompts)(config, source, renderer, max_rows)


def _warms_up(config: RunConfig) -> bool:
    return config.run.mode not in ("rollout_only", "supervised") and config.warmup.steps > 0


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


def _supervised_source(
    config: RunConfig, sources: Sequence[SourceConfig], renderer: Renderer, shuffle: bool = True
) -> SupervisedSource:
    rows = [_sequences(config, source, renderer) for source in sources]
    return SupervisedSource(rows, [source.weight for source in sources], config.run.seed, shuffle)


def _warmup_source(config: RunConfig) -> SourceConfig:
    assert config.warmup.source is not None  # by a rule of the config
    return config.warmup.source


def _held_out(config: RunConfig, renderer: Renderer) -> list[HeldOutSet]:
    return [HeldOutSet(entry.name, _sequences(config, entry, renderer)) for entry in config.validation.sets]


def _sequences(
    config: RunConfig, source: DatasetConfig, renderer: Renderer, max_rows: int | None = None
) -> list[SupervisedSequence]:
    """Of rows with answers, those that the model can take as a whole."""
    limit = TokenLimit("the model's max_position_embeddings", read_spec(config.model.path).max_positions)
    return read_sequences(_dataset(config, source, max_rows), renderer, limit, config.data.overlong_prompts)


def _prompt_source(config: RunConfig, renderer: Renderer) -> PromptSource:
    data, run = config.data, config.run
    return PromptSource(
        [_dataset(config, source) for source in data.train],
        [source.weight for source in data.train],
        renderer,
        run=run.name,
        seed=run.seed,
        shuffle=data.shuffle,
        longest=_longest_prompt(config),
        overlong=data.overlong_prompts,
    )


def _validation_sets(config: RunConfig, renderer: Renderer) -> list[ValidationSet]:
    return [
        ValidationSet(
            name=entry.name,
            prompts=tuple(_prompts(config, entry, renderer)),
            num_samples=entry.num_samples,
            pass_score=entry.pass_score,
            sampling=_sampling(config.validation_sampling(entry), renderer, config.run.seed),
        )
        for entry in config.validation.sets
    ]


def _prompts(
    config: RunConfig, source: DatasetConfig, renderer: Renderer, max_rows: int | None = None
) -> list[Prompt]:
    prompts = read_prompts(_dataset(config, source, max_rows), renderer, config.run.name)
    return drop_overlong_prompts(source.path, prompts, _longest_prompt(config), config.data.overlong_prompts)


def _dataset(config: RunConfig, source: DatasetConfig, max_rows: int | None = None) -> Dataset:
    """With the fields that graders of its samples cannot do without."""
    graders = () if source.agent in config.ungraded_agents else config.reward.graders
    required = {
        field: f"the grader {grader.name}"
        for field in ("ground_truth", "data_source")
        for grader in graders
        if grader.reads(field)
    }
    limits = [max_rows, source.max_prompts if isinstance(source, ValidationSetConfig) else None]
    max_rows = min((limit for limit in limits if limit is not None), default=None)
    return Dataset(source.path, source.parameters, source.agent, required, max_rows, source.learn)


def _longest_prompt(config: RunConfig) -> TokenLimit:
    """Also if nothing but the model limits a local engine's sequences."""
    if config.rollout.engine != "local" or config.sequence_limit:
        return config.longest_prompt
    positions = config.rollout.default_length(read_spec(config.model.path).max_positions)
    model = TokenLimit("the positions of the local engine - 1", positions - 1)
    return min(config.longest_prompt, model, key=lambda limit: limit.tokens)


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
