"""Every setting of a run: validated once, then frozen. Derived values are properties."""

# long because all of them stand in one place

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    IPvAnyNetwork,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from atoll.config import functions
from atoll.config.transports import TRANSPORTS

NonEmpty = Annotated[str, Field(min_length=1)]
Probability = Annotated[float, Field(gt=0, le=1)]
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Role = Literal["actor", "critic", "cost_critic", "reference", "reward_model", "cost_model"]


class Section(BaseModel):
    """A config table: unknown keys are refused, numbers are finite, values never change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FunctionConfig(Section):
    """A function by its name and, beside it, its keyword parameters: `{ name = "gae", lam = 0.95 }`.

    `name` alone may stand for the table. It is a built-in name or the user's own `file.py:function`; both
    are checked when the config is read (services/config/functions.py).
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    kind: ClassVar[functions.Kind]
    name: str

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _exists(self) -> "FunctionConfig":
        self._check()
        return self

    def _check(self) -> None:
        """Raises ConfigError or ValueError where there is nothing of that name that takes the parameters."""
        functions.check(self.kind, self.name, self.parameters, type(self).model_fields.keys() - {"name"})

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @property
    def is_users_own(self) -> bool:
        return functions.is_users_own(self.name)

    def has(self, trait: str) -> bool:
        """Whether a built-in function has one of its kind's traits; a user's own has none."""
        assert trait in self.kind.traits
        return trait in functions.traits(self.kind).get(self.name, ())


class SamplingConfig(Section):
    max_new_tokens: PositiveInt = 256
    temperature: NonNegativeFloat = 1.0  # 0: greedy
    top_p: Probability = 1.0
    top_k: NonNegativeInt = 0  # 0: off
    stop: tuple[
        Annotated[str, Field(min_length=1)], ...
    ] = ()  # the tokenizer's end-of-sequence token always stops


class RunSection(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]*[A-Za-z0-9_-][A-Za-z0-9_.-]*$")  # a folder: not "." or ".."
    dir: Path = Path("runs")  # the run writes to dir/name
    seed: NonNegativeInt = 0
    steps: PositiveInt
    mode: Literal["train", "rollout_only", "train_only", "supervised"] = "train"
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
    prompts_per_step: PositiveInt = 16  # in supervised mode: rows
    samples_per_prompt: PositiveInt = 8
    greedy_baseline: bool = False  # one greedy sample more per prompt, scored but not trained on (ReMax)
    max_staleness: NonNegativeInt = 0  # 0: strictly on-policy
    partial_rollouts: bool = False  # interrupt, push weights, continue the same sequences
    max_sample_attempts: PositiveInt = 3  # tries before a sample, and with it its group, is dropped
    max_dropped_share: Annotated[float, Field(ge=0, le=1)] = 0.5  # of all groups; above it the run ends
    lease_s: Annotated[float, Field(ge=1)] = 10.0  # silence of a service until it counts as lost
    start_timeout_s: Annotated[float, Field(gt=0)] = 14400.0  # for a service to load its model and register
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0  # for an answer, or progress towards it
    dump: bool = False  # write every consumed batch to runs/NAME/dumps
    server_networks: tuple[IPvAnyNetwork, ...] = ()  # private ones, of servers that register
    server_secrets: tuple[str, ...] = ()  # variables that their `auth` may name; also PREFIX*

    @field_validator("server_secrets")
    @classmethod
    def _secrets_are_others(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", name):
                raise ValueError(
                    f"coordinator.server_secrets: got {name!r}, expected an environment variable such as "
                    "JUDGE_TOKEN, or the beginning of several such as ATOLL_SECRET_*"
                )
            if any(fnmatchcase(own, name) for own in ("ATOLL_TOKEN", "ATOLL_OPERATOR_TOKEN")):
                raise ValueError(
                    f"coordinator.server_secrets: {name} would let the run's own tokens be sent to any "
                    "server that is registered: list other variables"
                )
        return names


class LocalEngineConfig(Section):
    slots: PositiveInt = 128  # sequences decoded at once
    max_length: PositiveInt = 2048  # prompt and response tokens of one sequence


class SGLangConfig(Section):
    """Any other key is passed to SGLang's server as the argument of that name."""

    model_config = ConfigDict(extra="allow")

    device: Literal["cuda", "cpu"] = "cuda"
    tp_size: PositiveInt = 1  # ranks of one replica


class RolloutSection(Section):
    replicas: PositiveInt = 1
    engine: Literal["local", "sglang"] = "local"
    python: Path | None = None  # interpreter of the replicas' environment; none: that of this command
    dtype: Literal["float32", "bfloat16"] = "float32"
    sampling: SamplingConfig = SamplingConfig()
    local: LocalEngineConfig = LocalEngineConfig()
    sglang: SGLangConfig = SGLangConfig()
    max_restarts: NonNegativeInt = 3  # an hour, of one replica's engine, and of its process
    threads: PositiveInt = 1


class GraderConfig(FunctionConfig):
    """What scores a response. Components are reported under the name."""

    kind = functions.GRADER
    weight: float = 1.0  # 0: a component that is reported, or is a cost, and no part of the score
    deadline_s: Annotated[float, Field(gt=0)] = 30.0  # for one response
    concurrency: PositiveInt | None = None  # responses at once; none: 1, of code reward.sandbox.programs

    def _check(self) -> None:
        if self.server is not None:
            functions.check_server(self.name, self.parameters)
            return
        super()._check()
        if self.name == "data_source" and (default := self.parameters.get("default")):
            if default == self.name:
                raise ValueError(
                    f"reward.graders: data_source: default = {default!r}, expected another grader"
                )
            functions.check(self.kind, default, {})

    @property
    def server(self) -> str | None:
        """The name of the external servers that this grader asks; None: it is a function."""
        return self.name.removeprefix("server:") if self.name.startswith("server:") else None


class SandboxConfig(Section):
    """Where the graders `code` and `data_source`, and tools of agents, run programs."""

    programs: PositiveInt = 16  # at once; up to 7 times as many that sleep or spin step aside
    memory_mb: PositiveInt = 512  # address space of one program
    output_kb: PositiveInt = 1024  # of what one program prints, and of its error stream
    disk_mb: NonNegativeInt = 16  # that one program may write; needs namespaces, else nothing is writable
    namespaces: Literal["auto", "never"] = "auto"  # auto: where a probe shows that they work


class RewardSection(Section):
    graders: tuple[GraderConfig, ...] = (GraderConfig(name="exact_match"),)
    services: PositiveInt = 1  # each with all graders
    max_restarts: NonNegativeInt = 3  # of one service in an hour, before the run stops
    sandbox: SandboxConfig | None = None  # none: only where a grader needs one
    retries: NonNegativeInt = 3  # of what failed of a response's grading for a passing reason
    max_queued: PositiveInt = 8192  # responses that a service holds; more go elsewhere, or wait

    @property
    def has_service(self) -> bool:
        """Whether the run has a reward service of its own: not where servers do all that there is."""
        return self.sandbox is not None or not all(grader.server for grader in self.graders)

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the external servers that graders ask."""
        return tuple(grader.server for grader in self.graders if grader.server)


class ParallelConfig(Section):
    """How a model lies on its ranks. See docs/trainer.md."""

    tensor: PositiveInt = 1  # every matrix is split over so many ranks
    sequence: bool = False  # and what lies between the matrices is split by tokens
    pipeline: PositiveInt = 1  # layers are split into so many stages
    virtual_pipeline: PositiveInt = 1  # pieces of the model on each stage, in turns
    context: PositiveInt = 1  # the tokens of a micro-batch are split
    expert: PositiveInt = 1  # experts are split over ranks that share nothing else but data
    data: PositiveInt = 1  # copies that share a batch

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data


class OptimizerConfig(Section):
    """AdamW."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    schedule: Literal["constant", "cosine", "wsd"] = "constant"  # wsd: constant, then linear decay
    warmup_steps: NonNegativeInt = 0  # linear, from 0
    decay_steps: PositiveInt | None = None  # the last so many of run.steps; cosine: none is all after warm-up
    min_learning_rate_share: Annotated[float, Field(ge=0, le=1)] = 0.0  # where the decay ends
    distributed: bool = False  # its state is split over the data-parallel ranks
    weight_decay: NonNegativeFloat = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) are trained in place of the weights."""

    rank: PositiveInt = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0  # an adapter counts alpha / rank
    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    push: Literal["merged", "adapter"] = "merged"  # what replicas get: whole weights, or the adapters alone
    path: Path | None = None  # folder of the peft library to begin with; none: new adapters


class RoleSection(Section):
    """A model of the run: an instance of the trainer service with its own processes."""

    parallel: ParallelConfig = ParallelConfig()
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights; the optimizer keeps them in float32, too
    max_tokens_per_microbatch: PositiveInt = 8192
    max_tokens_per_forward: PositiveInt = 32768  # of a pass that keeps nothing for a backward pass
    recompute: Literal["none", "selective", "full"] = "none"  # what backward computes again: attention, all
    offload: bool = False  # the model lies in host memory while others work
    max_restarts: NonNegativeInt = 3  # of its ranks, together, in an hour, before the run stops
    attention: Literal["shared_prefix", "segments", "flash"] = "shared_prefix"  # flash: flash-attn, on GPUs
    threads: PositiveInt = 1  # per rank


class TrainerSection(RoleSection):
    """The actor: the policy that is trained."""

    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None  # none: every weight is trained


class CriticSection(TrainerSection):
    """A value model: the policy's architecture with a value head, and its own optimizer."""

    path: Path | None = None  # none: model.path, with a value head that says 0
    clip: Annotated[float, Field(gt=0)] = 0.5  # of a value around the one that advantages came from
    warmup_steps: NonNegativeInt = 0  # first steps in which the critic learns and the actor waits


class ReferenceSection(RoleSection):
    """The policy that the KL divergence is measured from; started where algorithm.kl is set."""

    path: Path | None = None  # none: model.path
    placement: Literal["separate", "colocated"] = "separate"  # colocated: in the actor's processes


class ScorerSection(RoleSection):
    """A neural reward or cost model: a Hugging Face folder for sequence classification with one label."""

    path: Path
    weight: float = 1.0  # in the score; the cost counts as it is


class KLConfig(Section):
    """A penalty on leaving the reference policy."""

    where: Literal["loss", "reward"] = "loss"
    estimator: Literal["k1", "abs", "k2", "k3", "full", "k1+", "k3+"] = "k3"  # +: the gradient of k2
    coef: NonNegativeFloat = 1e-3
    target: Annotated[float, Field(gt=0)] | None = None  # in the reward: coef adapts to this KL per token
    horizon: PositiveInt = 10_000  # samples over which an adaptive coef moves


class CorrectionConfig(Section):
    """Importance weights for what differs between the rollout engine's and the trainer's logprobs."""

    level: Literal["token", "sequence", "geometric"] = "token"  # geometric: mean over the sequence's tokens
    method: Literal["truncate", "mask", "reject"] = "truncate"
    low: NonNegativeFloat = 0.0  # mask and reject: weights below have no part
    high: Annotated[float, Field(gt=0)] = 2.0  # truncate: largest weight; mask and reject: above, no part


class AdvantageConfig(FunctionConfig):
    """What a token was worth, from the scores of a batch."""

    kind = functions.ADVANTAGE


class LossConfig(FunctionConfig):
    """What a token contributes to the policy's loss."""

    kind = functions.LOSS


class ReweightConfig(FunctionConfig):
    """How much each sample counts in the loss, by its score (PF-PPO)."""

    kind = functions.REWEIGHT


class FilterConfig(FunctionConfig):
    """Which finished groups are trained on; others are replaced by new prompts."""

    kind = functions.FILTER
    max_refill: PositiveInt = 10  # groups left out in a row, in batches, before the run ends


class ConstraintConfig(Section):
    """Safe-RLHF: the mean cost of a sample is kept below `limit` by a Lagrangian multiplier."""

    cost: str | None = None  # the grader whose component is the cost; none: the [cost_model]
    limit: float = 0.0
    initial: Annotated[float, Field(gt=0)] = 1.0  # the multiplier at the start
    learning_rate: Annotated[float, Field(gt=0)] = 0.05  # of its logarithm
    maximum: Annotated[float, Field(gt=0)] = 100.0


class AlgorithmSection(Section):
    advantage: AdvantageConfig = AdvantageConfig(name="grpo")
    loss: LossConfig = LossConfig(name="ppo_clip")
    aggregation: Literal[
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
    ] = "token_mean"
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    num_minibatches: PositiveInt = 1
    num_epochs: PositiveInt = 1
    entropy_coef: float = 0.0  # of an entropy bonus
    kl: KLConfig | None = None
    correction: CorrectionConfig | None = None
    filter: FilterConfig | None = None
    reweight: ReweightConfig | None = None
    constraint: ConstraintConfig | None = None


class GuardsSection(Section):
    """What ends or pauses a run that diverges; none: not watched. Non-finite metrics always do."""

    max_ppo_kl: Annotated[float, Field(gt=0)] | None = None  # |actor/ppo_kl|
    max_logprob_diff: Annotated[float, Field(gt=0)] | None = None  # rollout_corr/logprob_diff_mean
    min_entropy: NonNegativeFloat | None = None
    max_entropy: NonNegativeFloat | None = None
    reward_drop: Annotated[float, Field(gt=0)] | None = None  # of the mean over `window` steps, from its best
    window: PositiveInt = 10  # steps
    action: Literal["stop", "pause"] = "stop"


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
    best: str | None = None  # "SET/avg@k", "SET/pass@k" or "SET/nll": keep the checkpoint where it was best


class CheckpointSection(Section):
    every: NonNegativeInt = 0  # steps; 0: not by their number
    every_minutes: NonNegativeFloat = 15.0  # since the last one, after the step in progress; 0: not by time
    at_end: bool = True
    keep: PositiveInt = 2


class WeightsSection(Section):
    """How the policy reaches the replicas. See docs/weights.md."""

    transport: Literal["shm", "cuda_ipc", "nccl", "tcp"] = "shm"
    bucket_mb: PositiveInt = 64  # MiB of a rank's part of one round
    deadline_s: Annotated[float, Field(gt=0)] = 60.0  # for a part to arrive
    delta: bool = False  # only what differs from the last version travels
    canary_every: NonNegativeInt = 1  # pushes; 0: fixed prompts are never scored by trainer and replica
    canary_tolerance: Annotated[float, Field(gt=0)] = 0.1  # mean difference of log-probabilities

    @property
    def stays_readable(self) -> bool:
        return TRANSPORTS[self.transport].stays_readable


class ServerConfig(Section):
    """Someone else's server, as `atoll register` adds one. See docs/rewards.md."""

    kind: Literal["reward", "tool", "env"]
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    url: str
    protocol: Literal["grpc", "http", "nemo_gym", "mcp", "openenv", "trainer"]
    options: dict[str, str] = {}  # of the protocol
    auth: str = ""  # "env:VARIABLE", where the coordinator finds the bearer token; "": none
    concurrency: PositiveInt = 16  # calls at once
    timeout_s: Annotated[float, Field(gt=0)] = 60.0  # of one call

    @field_validator("auth")
    @classmethod
    def _auth_is_a_reference(cls, value: str) -> str:
        if not re.fullmatch(r"(env:[A-Za-z_][A-Za-z0-9_]*)?", value):  # which may be the token itself
            raise ValueError(
                "servers: auth names an environment variable, as in env:JUDGE_TOKEN (what stands there now "
                "is not shown): put the token into a variable"
            )
        return value

    @field_validator("url")
    @classmethod
    def _url_holds_no_password(cls, value: str) -> str:
        if "@" in value.partition("://")[2].partition("/")[0]:
            raise ValueError("servers: url holds a password or a user: set auth instead")
        return value


class StoreSection(Section):
    url: str = "embedded"  # or redis://, rediss://, unix://
    max_mb: PositiveInt = (
        4096  # MiB of samples; above, only what the next step needs is begun, and a checkpoint is due
    )


class TokenLimit(NamedTuple):
    setting: str  # that says so
    tokens: int


class RunConfig(Section):
    run: RunSection
    model: ModelSection
    data: DataSection = DataSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    trainer: TrainerSection = TrainerSection()
    critic: CriticSection | None = None
    cost_critic: CriticSection | None = None
    reference: ReferenceSection = ReferenceSection()
    reward_model: ScorerSection | None = None
    cost_model: ScorerSection | None = None
    algorithm: AlgorithmSection = AlgorithmSection()
    guards: GuardsSection = GuardsSection()
    warmup: WarmupSection = WarmupSection()
    validation: ValidationSection = ValidationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    weights: WeightsSection = WeightsSection()
    servers: tuple[ServerConfig, ...] = ()
    store: StoreSection = StoreSection()

    @property
    def folder(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def roles(self) -> dict[Role, RoleSection]:
        """The models that the recipe needs, none other, and their settings."""
        algorithm = self.algorithm
        roles: dict[Role, RoleSection | None] = {"actor": self.trainer}
        if algorithm.advantage.has("needs_values") or algorithm.advantage.is_users_own:
            roles["critic"] = self.critic
            roles["cost_critic"] = self.cost_critic if algorithm.constraint else None
        if algorithm.kl:
            roles["reference"] = self.reference
        roles["reward_model"] = self.reward_model
        if algorithm.constraint and algorithm.constraint.cost is None:
            roles["cost_model"] = self.cost_model
        return {role: section for role, section in roles.items() if section is not None}

    @property
    def sequence_limit(self) -> TokenLimit | None:
        """Of prompt and response together; None: the model's own."""
        if self.rollout.engine == "local":
            return TokenLimit("rollout.local.max_length", self.rollout.local.max_length)
        length = (self.rollout.sglang.model_extra or {}).get("context_length")
        return None if length is None else TokenLimit("rollout.sglang.context_length", int(length))

    @property
    def longest_prompt(self) -> TokenLimit:
        """What a replica takes: it refuses a prompt that leaves room for no token."""
        limits = [TokenLimit("data.max_prompt_tokens", self.data.max_prompt_tokens)]
        if sequence := self.sequence_limit:
            limits.append(TokenLimit(f"{sequence.setting} - 1", sequence.tokens - 1))
        return min(limits, key=lambda limit: limit.tokens)

    @property
    def trained(self) -> tuple[Role, ...]:
        """The roles that learn: those with an optimizer."""
        return tuple(role for role, section in self.roles.items() if isinstance(section, TrainerSection))

    @property
    def followers(self) -> frozenset[Role]:
        """The roles that begin at the policy as the warm-up leaves it: they have no folder of their own."""
        kinds = CriticSection | ReferenceSection
        return frozenset(
            role
            for role, section in self.roles.items()
            if isinstance(section, kinds) and section.path is None
        )
