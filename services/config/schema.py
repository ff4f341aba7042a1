"""Every setting of a run: validated once, then frozen. Derived values are properties."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

Probability = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """A config table: unknown keys are refused, values never change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingConfig(Section):
    max_new_tokens: PositiveInt = 256
    temperature: NonNegativeFloat = 1.0  # 0: greedy
    top_p: Probability = 1.0
    top_k: NonNegativeInt = 0  # 0: off
    stop: tuple[str, ...] = ()  # the tokenizer's end-of-sequence token always stops


class RunSection(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    dir: Path = Path("runs")  # the run writes to dir/name
    seed: NonNegativeInt = 0
    steps: PositiveInt
    mode: Literal["train", "rollout_only", "train_only"] = "train"
    target_reward: float | None = None  # stop when the mean reward of the last target_window steps passes it
    target_window: PositiveInt = 10


class ModelSection(Section):
    path: Path  # Hugging Face folder: config.json, tokenizer.json, safetensors


class SourceConfig(Section):
    path: Path  # .parquet (verl's schema), .jsonl, or a Hugging Face dataset folder
    weight: Annotated[float, Field(gt=0)] = 1.0  # share of the draws


class ValidationSetConfig(Section):
    name: str
    path: Path
    num_samples: PositiveInt = 1  # k of avg@k and pass@k
    max_prompts: PositiveInt | None = None
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)


class DataSection(Section):
    train: tuple[SourceConfig, ...] = ()
    replay: Path | None = None  # a dump folder: consume its batches instead of generating
    max_prompt_tokens: PositiveInt = 1024
    overlong_prompts: Literal["filter", "refuse"] = "refuse"
    shuffle: bool = True


class CoordinatorSection(Section):
    """The dataflow. Batch sizes have one meaning and are never rewritten."""

    host: str = "127.0.0.1"
    port: NonNegativeInt = 0  # 0: any free port
    prompts_per_step: PositiveInt = 16
    samples_per_prompt: PositiveInt = 8
    max_staleness: NonNegativeInt = 0  # 0: strictly on-policy
    partial_rollouts: bool = False  # interrupt, push weights, continue the same sequences
    max_sample_attempts: PositiveInt = 3  # tries before a sample, and with it its group, is dropped
    max_dropped_share: Annotated[float, Field(ge=0, le=1)] = 0.5  # of all groups; above it the run ends
    lease_s: Annotated[float, Field(gt=0)] = 10.0
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    dump: bool = False  # write every consumed batch to runs/NAME/dumps


class LocalEngineConfig(Section):
    slots: PositiveInt = 128  # sequences decoded at once
    max_length: PositiveInt = 2048  # prompt and response tokens of one sequence


class RolloutSection(Section):
    replicas: PositiveInt = 1
    engine: Literal["local"] = "local"
    dtype: Literal["float32", "bfloat16"] = "float32"
    sampling: SamplingConfig = SamplingConfig()
    local: LocalEngineConfig = LocalEngineConfig()
    max_restarts: NonNegativeInt = 3  # of one replica's process before the run stops
    threads: PositiveInt = 1


class GraderConfig(Section):
    name: str  # a key of services/reward/score.py GRADERS, or file.py:function
    weight: float = 1.0


class RewardSection(Section):
    graders: tuple[GraderConfig, ...] = (GraderConfig(name="exact_match"),)
    retries: NonNegativeInt = 2  # of a response whose grading failed for a passing reason
    timeout_s: Annotated[float, Field(gt=0)] = 60.0  # for a batch of responses; after it, for each alone


class ParallelConfig(Section):
    tensor: PositiveInt = 1
    data: PositiveInt = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.data


class OptimizerConfig(Section):
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    warmup_steps: NonNegativeInt = 0  # linear, from 0
    weight_decay: NonNegativeFloat = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0


class TrainerSection(Section):
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    max_tokens_per_microbatch: PositiveInt = 8192
    attention: Literal["shared_prefix", "segments"] = "shared_prefix"
    threads: PositiveInt = 1  # per rank


class AlgorithmSection(Section):
    advantage: Literal["grpo"] = "grpo"
    loss: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    aggregation: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    num_minibatches: PositiveInt = 1
    num_epochs: PositiveInt = 1
    drop_equal_groups: bool = (
        False  # DAPO's dynamic sampling: replace groups whose samples all score the same
    )


class WarmupSection(Section):
    """Supervised steps before the first rollout; rows carry their answer in `response`."""

    steps: NonNegativeInt = 0
    rows_per_step: PositiveInt = 128
    learning_rate: Annotated[float, Field(ge=0)] = 1e-3
    target_reward: float | None = (
        None  # end early where the first validation set, sampled as in training, has it
    )
    check_every: PositiveInt = 10  # steps between two looks at it
    source: SourceConfig | None = None


class ValidationSection(Section):
    every: NonNegativeInt = 0  # steps; 0: never in between
    at_start: bool = True
    at_end: bool = True
    sets: tuple[ValidationSetConfig, ...] = ()
    best: str | None = None  # "SET/avg@k" or "SET/pass@k": keep the checkpoint where it was highest


class CheckpointSection(Section):
    every: NonNegativeInt = 0  # steps; 0: only at the end
    at_end: bool = True
    keep: PositiveInt = 2


class StoreSection(Section):
    url: str = "embedded"  # or redis://, rediss://, unix://


class RunConfig(Section):
    run: RunSection
    model: ModelSection
    data: DataSection = DataSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    trainer: TrainerSection = TrainerSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    warmup: WarmupSection = WarmupSection()
    validation: ValidationSection = ValidationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    store: StoreSection = StoreSection()

    @property
    def folder(self) -> Path:
        return self.run.dir / self.run.name

    @model_validator(mode="after")
    def _combinations(self) -> "RunConfig":
        if self.run.mode == "train_only" and self.data.replay is None:
            raise ValueError(
                'run.mode = "train_only" starts no rollout service: set data.replay to a dump folder'
            )
        if self.data.replay is None and not self.data.train:
            raise ValueError("no training data: add a [[data.train]] table with a path")
        if self.coordinator.samples_per_prompt == 1 and self.algorithm.advantage == "grpo":
            raise ValueError(
                'algorithm.advantage = "grpo" compares the samples of a prompt: '
                "set coordinator.samples_per_prompt to 2 or more"
            )
        if self.coordinator.prompts_per_step < self.algorithm.num_minibatches:
            raise ValueError(
                f"algorithm.num_minibatches = {self.algorithm.num_minibatches} is more than the "
                f"{self.coordinator.prompts_per_step} groups of a step"
            )
        if self.warmup.steps and self.warmup.source is None:
            raise ValueError("warmup.steps > 0 needs [warmup.source] with a path")
        if self.warmup.target_reward is not None and not (self.validation.sets and self.run.mode == "train"):
            raise ValueError(
                "warmup.target_reward is measured by the replicas on the first [[validation.sets]]: add one, "
                'and use run.mode = "train" (else set warmup.steps alone)'
            )
        return self
