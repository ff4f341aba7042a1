"""All settings of a run: validated once, then frozen. Derived values are properties."""

# long because all settings are in one place

import difflib
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, get_args

from pydantic import (
    AfterValidator,
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
from atoll.config.gpus import Gpu, check_gpus, parse_gpus
from atoll.config.transports import TRANSPORTS
from atoll.config.user_files import check_class

MAX_SAMPLES: Final = 131_072  # of a step
NonEmpty = Annotated[str, Field(min_length=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Probability = Annotated[float, Field(gt=0, le=1)]
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GpuList = Annotated[str, AfterValidator(check_gpus)]
Role = Literal["actor", "critic", "cost_critic", "reference", "reward_model", "cost_model"]
# "auto" is resolved when a run is launched (placement.py); a service never sees it
Device = Literal["auto", "cuda", "cpu"]
Dtype = Literal["auto", "float32", "bfloat16"]
PlacementMode = Literal["auto", "standalone", "split", "colocated"]


def check_auth(value: str) -> str:
    """Of a server: it is called by a bearer token in an environment variable."""
    if not re.fullmatch(r"(env:[A-Za-z_][A-Za-z0-9_]*)?", value):  # it may be the token itself
        raise ValueError(
            "auth must name an environment variable, as in env:JUDGE_TOKEN (the current value is not shown): "
            "put the token into a variable"
        )
    return value


def check_url(value: str) -> str:
    if "@" in value.partition("://")[2].partition("/")[0]:
        raise ValueError("url contains a user or password: use auth instead")
    return value


class Section(BaseModel):
    """A config table: unknown keys are rejected, numbers are finite, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FunctionConfig(Section):
    """A function and its keyword parameters: `{ name = "gae", lam = 0.95 }`.

    The name alone may replace the table. It is a built-in name or the user's own `file.py:function`; both are
    checked when the config is read (services/config/functions.py).
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    kind: ClassVar[functions.FunctionKind]
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
        """Raises ConfigError or ValueError if no function of that name takes the parameters."""
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


class TruncationConfig(Section):
    """Truncation of the next-token distribution, and stop strings."""

    top_p: Probability = 1.0
    top_k: NonNegativeInt = 0  # 0: off
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()  # the end-of-sequence token always stops


class SamplingConfig(TruncationConfig):
    max_new_tokens: PositiveInt = 256
    temperature: NonNegativeFloat = 1.0  # 0: greedy


class ValidationSamplingConfig(TruncationConfig):
    max_new_tokens: PositiveInt | None = None  # default: rollout.sampling.max_new_tokens
    temperature: NonNegativeFloat = 0.0  # 0: greedy


class RunSection(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]*[A-Za-z0-9_-][A-Za-z0-9_.-]*$")  # name of the run's folder
    dir: Path = Path("runs")  # the run is written to dir/name
    seed: NonNegativeInt = 0
    steps: PositiveInt  # training steps
    mode: Literal["train", "rollout_only", "train_only", "supervised"] = "train"
    target_reward: float | None = None  # stop if the mean reward of the last target_window steps exceeds it
    target_window: PositiveInt = 10  # steps


class ModelSection(Section):
    path: Path  # Hugging Face folder: config.json, tokenizer.json, safetensors


class DatasetConfig(Section):
    """A file of rows, or your own function that returns rows, with its parameters. See docs/data.md."""

    model_config = ConfigDict(extra="allow")
    path: Path  # .parquet, .jsonl, .json, a Hugging Face dataset folder, or file.py:function
    agent: str = ""  # name of the [[agents]] entry that receives the rows; "": single-turn responses
    learn: tuple[Literal["assistant", "tool", "user", "system"], ...] = (
        "assistant",  # of rows with answers: roles whose messages are learned
    )

    @model_validator(mode="after")
    def _takes_parameters(self) -> "DatasetConfig":
        settings = type(self).model_fields.keys() - {"path"}
        if functions.is_users_own(str(self.path)):
            functions.check(functions.ROWS, str(self.path), self.parameters, settings)
        elif self.parameters:
            name = min(self.parameters)
            near = difflib.get_close_matches(name, settings, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(
                f"dataset {self.path}: {name}: unknown key; {hint}Only a path = file.py:function has "
                "parameters"
            )
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """Of the function."""
        return dict(self.model_extra or {})


class SourceConfig(DatasetConfig):
    weight: Annotated[float, Field(gt=0)] = 1.0  # relative sampling weight


class ValidationSetConfig(DatasetConfig):
    name: str
    num_samples: Annotated[int, Field(gt=0, le=MAX_SAMPLES)] = 1  # k of avg@k and pass@k
    pass_score: float = 1.0  # minimum score that counts as a pass in pass@k
    max_prompts: PositiveInt | None = None  # use only the first rows; default: all
    sampling: ValidationSamplingConfig = ValidationSamplingConfig()


class DataSection(Section):
    train: tuple[SourceConfig, ...] = ()
    replay: Path | None = None  # folder of dumps to train on, for mode = "train_only"
    max_prompt_tokens: PositiveInt = 1024  # limit of a rendered prompt
    overlong_prompts: Literal["filter", "refuse"] = "refuse"  # filter: skip prompts above a length limit
    shuffle: bool = True  # in every pass over a dataset


class CoordinatorSection(Section):
    """The dataflow. Batch sizes are never changed implicitly."""

    host: str = "127.0.0.1"  # address to listen on
    port: Port = 0  # 0: any free port
    prompts_per_step: PositiveInt = 16  # in supervised mode: rows per step
    samples_per_prompt: PositiveInt = 8
    greedy_baseline: bool = False  # add a greedy sample per prompt: scored, not trained on (ReMax)
    max_staleness: NonNegativeInt = 0  # 0: strictly on-policy
    on_age: Literal["wait", "cut", "weigh"] = (
        "wait"  # samples near max_staleness: wait, cut agents' sessions short, or weigh old turns with 0
    )
    partial_rollouts: bool = False  # interrupt sequences for a weight push, then continue them
    max_sample_attempts: PositiveInt = 3  # attempts before a sample is dropped with its group
    sample_timeout_s: Annotated[float, Field(gt=0)] = 3600.0  # timeout of one attempt
    max_dropped_share: Annotated[float, Field(ge=0, le=1)] = 0.5  # of all groups; above it, the run fails
    lease_s: Annotated[float, Field(ge=1)] = 10.0  # time without heartbeat until a suspended service is lost
    away_timeout_s: Annotated[float, Field(gt=0)] = (
        600.0  # time without coordinator after which a service exits; a restarted coordinator reuses services
    )
    start_timeout_s: Annotated[float, Field(gt=0)] = (
        14400.0  # timeout for the store, for services to register, and for a reward service to return
    )
    drain_grace_s: NonNegativeFloat = (
        20.0  # time for a service that leaves to finish its work; keep it below a container's stop grace
    )
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0  # timeout without response or progress
    dump: Literal["recent", "all", "none"] = "recent"  # dumps to keep; recent: the last ten steps
    server_networks: tuple[IPvAnyNetwork, ...] = ()  # private networks that registered servers may use
    server_secrets: tuple[str, ...] = ()  # variables allowed in their `auth`; PREFIX* matches several

    @field_validator("on_age", mode="before")
    @classmethod
    def _was_named_replace(cls, value: object) -> object:
        return "wait" if value == "replace" else value  # in the configs of earlier versions

    @field_validator("dump", mode="before")
    @classmethod
    def _was_a_switch(cls, value: object) -> object:
        return {True: "all", False: "none"}[value] if isinstance(value, bool) else value

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
    slots: PositiveInt = 128  # concurrent sequences
    max_length: NonNegativeInt = 0  # prompt plus response tokens; 0: the model's maximum, at most 2048


class SGLangConfig(Section):
    """Any other key becomes an argument of SGLang's server."""

    model_config = ConfigDict(extra="allow")

    tp_size: PositiveInt = 1  # tensor-parallel ranks per replica


class RolloutSection(Section):
    replicas: PositiveInt = 1  # number of rollout services
    engine: Literal["local", "sglang"] = "local"
    python: Path | None = None  # Python interpreter of the replicas; default: the current one
    device: Device = "auto"  # auto: as for a trainer; the local engine computes on the CPU
    dtype: Dtype = "auto"  # auto: bfloat16 on cuda, else float32
    sampling: SamplingConfig = SamplingConfig()
    local: LocalEngineConfig = LocalEngineConfig()
    sglang: SGLangConfig = SGLangConfig()
    max_restarts: NonNegativeInt = 3  # per replica and hour, for its engine and for its process
    threads: PositiveInt = 1  # CPU threads per replica

    @model_validator(mode="before")
    @classmethod
    def _device_was_sglangs(cls, value: Any) -> Any:
        """In the configs of earlier versions."""
        sglang = value.get("sglang") if isinstance(value, dict) else None
        if not isinstance(sglang, dict) or "device" not in sglang:
            return value
        sglang = {**sglang}
        device = sglang.pop("device")
        if device == "cuda" and value.get("engine") != "sglang":  # the default that every config.json had
            return value | {"sglang": sglang}
        if value.get("device", device) != device:
            raise ValueError(
                f"rollout.device = {value['device']!r}, but rollout.sglang.device = {device!r}: remove the "
                "latter"
            )
        return value | {"device": device, "sglang": sglang}

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks of a replica."""
        return self.sglang.tp_size if self.engine == "sglang" else 1

    def default_length(self, max_positions: int) -> int:
        """Prompt and response tokens per sequence for a model of so many positions, if no setting limits
        them."""
        return min(2048, max_positions) if self.engine == "local" else max_positions


class GraderConfig(FunctionConfig):
    """A function or external server that scores responses. See docs/rewards.md."""

    kind = functions.GRADER
    weight: float = 1.0  # in the score; 0: only report the value, or use it as a cost
    deadline_s: Annotated[float, Field(gt=0)] = 30.0  # time limit per response
    concurrency: PositiveInt | None = (
        None  # parallel responses (default: 1; for `code`, reward.sandbox.programs)
    )
    file: str = ""  # of an agent's workspace, to be graded instead of its last reply, such as "solution.py"

    def _check(self) -> None:
        if self.server is not None:
            if self.file:
                raise ValueError(f"reward.graders: {self.name}: servers get replies, not files: remove file")
            functions.check_server(self.name, self.parameters)
            return
        super()._check()
        if self.name == "data_source" and (default := self.parameters.get("default")):
            if default == self.name:
                raise ValueError(
                    f"reward.graders: data_source: default = {default!r}, expected another grader"
                )
            functions.check(self.kind, default, {})

    def reads(self, field: Literal["ground_truth", "data_source"]) -> bool:
        """Whether it fails without this field of a row. The user's own functions and external servers may do
        without."""
        if self.server is not None or (field == "data_source" and self.parameters.get("default")):
            return False
        return self.has(f"needs_{field}")

    @property
    def server(self) -> str | None:
        """Name of the external servers that this grader calls; None if it is a function."""
        return self.name.removeprefix("server:") if self.name.startswith("server:") else None


class SandboxConfig(Section):
    """The sandbox for programs of the graders `code` and `data_source`, and for agents' tools."""

    programs: PositiveInt = (
        16  # concurrent programs of graders; up to 7x as many are parked while they sleep or spin
    )
    executions: PositiveInt = 16  # likewise of tools, counted separately: neither waits for the other
    memory_mb: PositiveInt = 512  # address space per program
    output_kb: PositiveInt = 1024  # per program, for stdout and stderr each
    disk_mb: NonNegativeInt = 16  # writable disk per program; 0 without namespaces
    namespaces: Literal["auto", "never"] = "auto"  # auto: use them if a probe shows that they work


class RewardSection(Section):
    graders: tuple[GraderConfig, ...] = (GraderConfig(name="exact_match"),)
    services: PositiveInt = 1  # number of reward services; each runs all graders
    max_restarts: NonNegativeInt = 3  # per service and hour; above it, the run stops
    sandbox: SandboxConfig | None = None  # default: a sandbox only if a grader needs one
    retries: NonNegativeInt = 3  # retries after transient grading failures
    max_queued: PositiveInt = (
        8192  # responses held per service, and calls of tools; further ones wait or go to another service
    )

    @property
    def has_service(self) -> bool:
        """Whether the run needs its own reward service: not if external servers do all grading."""
        return self.sandbox is not None or not all(grader.server for grader in self.graders)

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the external servers that graders call."""
        return tuple(grader.server for grader in self.graders if grader.server)


class ParallelConfig(Section):
    """The parallel layout of a model. See docs/trainer.md."""

    tensor: PositiveInt = 1  # tensor-parallel ranks, which share each matrix
    sequence: bool = False  # sequence parallelism: split activations between the matrices by tokens
    pipeline: PositiveInt = 1  # pipeline stages, which share the layers
    virtual_pipeline: PositiveInt = 1  # virtual pipeline stages per rank
    context: PositiveInt = 1  # context-parallel ranks, which share the tokens of a micro-batch
    expert: PositiveInt = 1  # expert-parallel ranks, which share the experts
    data: PositiveInt = 1  # data-parallel copies

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data


class OptimizerConfig(Section):
    """AdamW."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    schedule: Literal["constant", "cosine", "wsd"] = "constant"  # wsd: constant, then linear decay
    warmup_steps: NonNegativeInt = 0  # linear rise from 0
    decay_steps: PositiveInt | None = None  # last steps of the run; default for cosine: all after warm-up
    min_learning_rate_share: Annotated[float, Field(ge=0, le=1)] = (
        0.0  # final learning rate, as a share of learning_rate
    )
    distributed: bool = False  # shard the optimizer state over data-parallel ranks
    weight_decay: NonNegativeFloat = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0


class LoraConfig(Section):
    """Trains low-rank adapters (Hu et al. 2021, arXiv:2106.09685) instead of the weights."""

    rank: PositiveInt = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0  # the adapter's output is scaled by alpha / rank
    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    push: Literal["merged", "adapter"] = "merged"  # push merged weights or only adapters
    path: Path | None = None  # peft folder with initial adapters; default: new adapters


class RoleSection(Section):
    """A model with its own trainer service and processes."""

    parallel: ParallelConfig = ParallelConfig()
    device: Device = "auto"  # auto: cuda if there are GPUs and replicas use them
    dtype: Dtype = (
        "auto"  # of weights; auto: bfloat16 on cuda (the optimizer keeps float32 copies), else float32
    )
    max_tokens_per_microbatch: PositiveInt = 8192  # in training
    max_tokens_per_forward: PositiveInt = 32768  # in a forward pass without backward
    recompute: Literal["none", "selective", "full", "offload"] = (
        "none"  # activations to recompute; selective: large but cheap ones; offload: keep all on the host
    )
    offload: bool = False  # move the model to host memory while it is idle
    max_restarts: NonNegativeInt = 3  # per hour, for all ranks together
    attention: Literal["auto", "varlen", "shared_prefix", "segments", "flash"] = (
        "auto"  # varlen on a GPU in bfloat16, otherwise shared_prefix; flash: the flash-attn package
    )
    threads: PositiveInt = 1  # CPU threads per rank


class TrainerSection(RoleSection):
    """The actor: the policy that is trained."""

    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None  # default: train all weights
    router_replay: bool = False  # mixture of experts: train with the experts that rollout chose per token


class CriticSection(TrainerSection):
    """A value model: the policy's architecture with a value head, and its own optimizer."""

    path: Path | None = None  # default: model.path, with a zero-initialized value head
    clip: Annotated[float, Field(gt=0)] = 0.5  # clip range around the old values
    warmup_steps: NonNegativeInt = 0  # initial steps that train only the critic


class ReferenceSection(RoleSection):
    """The frozen reference policy; used only with algorithm.kl."""

    path: Path | None = None  # default: model.path
    placement: Literal["separate", "colocated"] = "separate"  # colocated: runs in the actor's processes


class ScorerSection(RoleSection):
    """A neural reward or cost model: a Hugging Face folder for sequence classification with one label."""

    path: Path  # Hugging Face folder
    weight: float = 1.0  # in the score; not applied to costs


class KLConfig(Section):
    """A penalty for deviating from the reference policy."""

    where: Literal["loss", "reward"] = "loss"
    estimator: Literal["k1", "abs", "k2", "k3", "full", "k1+", "k3+"] = "k3"  # +: gradient of k2
    coef: NonNegativeFloat = 1e-3  # initial value if target is set
    target: Annotated[float, Field(gt=0)] | None = (
        None  # adapt coef to this KL per token (only where = "reward")
    )
    horizon: PositiveInt = 10_000  # samples; time scale of an adaptive coef


class CorrectionConfig(Section):
    """Importance weights for the mismatch between the rollout engine's and the trainer's logprobs."""

    level: Literal["token", "sequence", "geometric"] = "token"  # geometric: mean over a sequence's tokens
    method: Literal["truncate", "mask", "reject"] = "truncate"
    low: NonNegativeFloat = 0.0  # mask and reject: lower bound of accepted weights
    high: Annotated[float, Field(gt=0)] = 2.0  # truncate: maximum weight; mask and reject: upper bound


class AdvantageConfig(FunctionConfig):
    """The advantage estimator."""

    kind = functions.ADVANTAGE


class LossConfig(FunctionConfig):
    """The policy loss of a token."""

    kind = functions.LOSS


class ReweightConfig(FunctionConfig):
    """Sample weights in the loss, by score (PF-PPO)."""

    kind = functions.REWEIGHT


class FilterConfig(FunctionConfig):
    """Filters finished groups before training; new prompts replace the others."""

    kind = functions.FILTER
    max_refill: PositiveInt = 10  # batches of filtered groups, per full batch, before the run fails


class ConstraintConfig(Section):
    """Safe-RLHF: a Lagrange multiplier keeps the mean cost of samples below `limit`."""

    cost: str | None = None  # grader whose value is the cost; default: the [cost_model]
    limit: float = 0.0  # on the mean cost
    initial: Annotated[float, Field(gt=0)] = 1.0  # initial multiplier
    learning_rate: Annotated[float, Field(gt=0)] = 0.05  # of the multiplier's logarithm
    maximum: Annotated[float, Field(gt=0)] = 100.0  # maximum multiplier


class AlgorithmSection(Section):
    advantage: AdvantageConfig = AdvantageConfig(name="grpo")
    loss: LossConfig = LossConfig(name="ppo_clip")
    aggregation: Literal[
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
    ] = "token_mean"
    old_logprobs: Literal["trainer", "rollout"] = "trainer"  # trainer: recompute them at each step
    num_minibatches: PositiveInt = 1  # updates per epoch over the batch
    num_epochs: PositiveInt = 1  # over the batch of a step
    entropy_coef: float = 0.0  # coefficient of the entropy bonus
    kl: KLConfig | None = None
    correction: tuple[CorrectionConfig, ...] = ()  # a table, or several in a list
    filter: FilterConfig | None = None
    reweight: ReweightConfig | None = None
    constraint: ConstraintConfig | None = None

    @field_validator("correction", mode="before")
    @classmethod
    def _one_correction_is_a_list(cls, value: object) -> object:
        if value is None:  # in the configs of earlier versions
            return ()
        return (value,) if isinstance(value, dict) else value


class GuardsSection(Section):
    """Limits that stop or pause a diverging run. Non-finite metrics always stop it."""

    max_ppo_kl: Annotated[float, Field(gt=0)] | None = None  # limit of abs(actor/ppo_kl)
    max_logprob_diff: Annotated[float, Field(gt=0)] | None = None  # limit of rollout_corr/logprob_diff_mean
    min_entropy: NonNegativeFloat | None = None  # of actor/entropy
    max_entropy: NonNegativeFloat | None = None  # of actor/entropy
    reward_drop: Annotated[float, Field(gt=0)] | None = (
        None  # maximum drop of the mean reward over `window` steps from its best
    )
    window: PositiveInt = 10  # steps
    action: Literal["stop", "pause"] = "stop"


class WarmupSection(Section):
    """Supervised steps before the first rollout, on rows with answers. See docs/data.md."""

    steps: NonNegativeInt = 0  # 0: no warm-up
    rows_per_step: PositiveInt = 128
    learning_rate: Annotated[float, Field(ge=0)] = 1e-3
    target_reward: float | None = (
        None  # stop early if the first validation set, sampled as in training, reaches it
    )
    check_every: PositiveInt = 10  # steps between evaluations of target_reward
    source: SourceConfig | None = None


class ValidationSection(Section):
    every: NonNegativeInt = 0  # steps; 0: not during training
    at_start: bool = True
    at_end: bool = True
    sets: tuple[ValidationSetConfig, ...] = ()
    best: str | None = None  # keep the checkpoint with the best "SET/avg@k", "SET/pass@k" or "SET/nll"


class CheckpointSection(Section):
    every: NonNegativeInt = 0  # steps; 0: off
    every_minutes: NonNegativeFloat = 15.0  # minutes since the last checkpoint; 0: off
    at_end: bool = True
    keep: PositiveInt = 2  # number of latest checkpoints to keep


ClientRule = Literal["billing_header", "fold_system"]


class GatewaySection(Section):
    """Chat APIs for agents; started if a dataset has an agent."""

    instances: PositiveInt = 1  # number of gateway processes
    host: str = "127.0.0.1"
    port: Port = 0  # instance i listens on port + i; 0: any free ports
    thinking: Literal["keep", "template"] = (
        "keep"  # past thinking: as sampled, or as the chat template renders it
    )
    renderer: str = ""  # a model family of the `renderers` package; "": the model's chat template
    tool_format: Literal["auto", "hermes", "qwen_xml", "llama"] = "auto"  # of tool calls in sampled text
    rules: tuple[ClientRule, ...] = ()  # changes to client requests: "billing_header", "fold_system"
    max_body_mb: PositiveInt = 32  # MiB per request
    max_restarts: NonNegativeInt = 3  # per instance and hour


OnEnd = Literal["train", "weight_0", "replace"]
AGENT_TABLES: Final = ("tools", "environment", "http", "command")


class SessionEndsConfig(Section):
    """For each reason that ends a session: `train` on it, give it `weight_0`, or `replace` it."""

    turns: OnEnd = "train"
    tokens: OnEnd = "train"
    seconds: OnEnd = "train"
    versions: OnEnd = "train"
    context: OnEnd = "train"  # the conversation outgrew the model's context
    age: OnEnd = "train"  # its next turn would be too old to train on
    agent_failed: OnEnd = "replace"
    environment_failed: OnEnd = "replace"
    cancelled: OnEnd = "replace"

    def of(self, reason: str) -> OnEnd:
        """`reason` as sessions have it: "agent failed"."""
        chosen: dict[str, OnEnd] = self.model_dump()
        return chosen[reason.replace(" ", "_")]


class ToolLoopConfig(Section):
    """The built-in tool loop: the policy calls tools until it replies without a call."""

    servers: tuple[NonEmpty, ...] = ()  # names of tool servers, in [[servers]] or by `atoll register tool`
    functions: tuple[str, ...] = ()  # file.py:function of your own; each call runs in the sandbox
    timeout_s: Annotated[float, Field(gt=0)] = 10.0  # per call of a function
    max_result_chars: PositiveInt = 16384  # longer results are cut

    @model_validator(mode="after")
    def _has_tools(self) -> "ToolLoopConfig":
        if not (self.servers or self.functions):
            raise ValueError("agents.tools: set servers, functions, or both")
        return self

    @field_validator("functions")
    @classmethod
    def _exist(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            functions.check(functions.TOOL, name, {})
        return names


class EnvironmentLoopConfig(Section):
    """The built-in environment loop: each reply of the policy is an action."""

    server: str = ""  # name of environment servers, in [[servers]] or by `atoll register env`
    environment: str = ""  # or a class of your own, file.py:Class, as Gymnasium has them
    action: str = ""  # action field for the reply; "": the only required one
    observation: str = ""  # observation field that the policy reads; "": the only one with text, else all

    @model_validator(mode="after")
    def _is_one(self) -> "EnvironmentLoopConfig":
        if bool(self.server) == bool(self.environment):
            raise ValueError("agents.environment: set either server or environment (file.py:Class)")
        if self.environment:
            if self.action or self.observation:
                raise ValueError(
                    "agents.environment: action and observation are fields of a server's: remove them"
                )
            check_class("agents.environment.environment", self.environment)
        return self


class HttpAgentConfig(Section):
    """An agent that runs elsewhere: each session is one POST of its task."""

    url: str
    auth: str = ""  # "env:VARIABLE": the variable with the bearer token; "": none

    _auth_is_a_reference = field_validator("auth")(check_auth)
    _url_holds_no_password = field_validator("url")(check_url)


class CommandConfig(Section):
    """A program that is started for each session, in a workspace of its own."""

    command: Annotated[
        tuple[NonEmpty, ...], Field(min_length=1)
    ]  # program and arguments; "{task}" is replaced
    workspace: Path | None = None  # folder that each session gets a copy of; default: an empty one
    files: tuple[NonEmpty, ...] = ()  # of the workspace, for graders, such as "*.py"
    env: dict[str, str] = {}  # more environment variables
    memory_mb: PositiveInt = 4096  # MiB per process, of data (RLIMIT_DATA: heap and private mappings)
    cpu_s: PositiveInt = 3600  # CPU seconds per process
    file_mb: PositiveInt = 256  # MiB per file that it writes
    output_kb: PositiveInt = 1024  # kept of its output, in the log


class AgentConfig(Section):
    """An agent: your own function `async def agent(session: AgentSession)`, or one of the four tables. See
    docs/agents.md."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")  # datasets refer to it by this name
    function: str = ""  # file.py:function, an `async def` with one parameter
    tools: ToolLoopConfig | None = None  # the built-in tool loop
    environment: EnvironmentLoopConfig | None = None  # the built-in environment loop
    http: HttpAgentConfig | None = None  # an agent that is called by HTTP
    command: CommandConfig | None = None  # a program started for each session
    python: Path | None = None  # Python interpreter of these processes; default: the current one
    processes: PositiveInt = 1  # number of processes that run the agent
    concurrency: PositiveInt = 64  # concurrent sessions per process
    max_turns: NonNegativeInt = 0  # per session; 0: no limit
    max_tokens: NonNegativeInt = 0  # policy tokens per session; 0: no limit
    max_seconds: NonNegativeFloat = 3600.0  # per session; 0: no limit
    max_versions: NonNegativeInt = 0  # weight pushes during a session; 0: no limit
    train: Literal["main", "side", "all"] = "main"  # conversations to train on; side: titles and the like
    reward: Literal["graders", "session", "both"] = (
        "graders"  # session: from the agent or its environment, which is the default for an environment
    )
    reward_weight: float = 1.0  # of the session's own rewards, beside those of reward.graders
    on_end: SessionEndsConfig = SessionEndsConfig()
    max_restarts: NonNegativeInt = 3  # per process and hour

    @field_validator("function")
    @classmethod
    def _exists(cls, name: str) -> str:
        if name:
            functions.check(functions.AGENT, name, {})
        return name

    @model_validator(mode="before")
    @classmethod
    def _environments_reward(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("environment") and "reward" not in value:
            return value | {"reward": "session"}
        return value

    @model_validator(mode="after")
    def _is_one(self) -> "AgentConfig":
        given = [name for name in ("function", *AGENT_TABLES) if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                f"agents: {self.name} has {' and '.join(given) or 'nothing that runs it'}: set one of "
                f"function, {', '.join(f'[agents.{name}]' for name in AGENT_TABLES)}"
            )
        return self

    @property
    def tool_servers(self) -> tuple[str, ...]:
        """Names of the tool servers that its sessions use."""
        return self.tools.servers if self.tools else ()

    @property
    def env_server(self) -> str:
        """Name of the environment servers, one of which each session occupies; "": none."""
        return self.environment.server if self.environment else ""


class WeightsSection(Section):
    """How weights are pushed to the replicas. See docs/weights.md."""

    transport: Literal["auto", "shm", "cuda_ipc", "nccl", "tcp"] = (
        "auto"  # nccl between GPUs, cuda_ipc if trainer and replicas share them on one host, else shm
    )
    bucket_mb: PositiveInt = 64  # MiB per rank and round of a push
    staging: Literal["device", "host"] = "device"  # memory in which a replica on a GPU stages a version
    deadline_s: Annotated[float, Field(gt=0)] = 60.0  # timeout for a part to arrive
    delta: bool = False  # push only the difference to the last version
    canary_every: NonNegativeInt = 1  # pushes between comparisons of trainer and replica; 0: never
    canary_tolerance: Annotated[float, Field(gt=0)] = 0.1  # maximum mean absolute difference of logprobs

    @property
    def stays_readable(self) -> bool:
        return TRANSPORTS[self.transport].stays_readable

    @property
    def max_senders(self) -> int:
        return TRANSPORTS[self.transport].max_senders


class GpusConfig(Section):
    """GPUs by their index in nvidia-smi: "0-3,6", or on several hosts "0-7,node1:0-7". Rank r of a role is on
    the r-th. Default: the largest role first, replicas last."""

    actor: GpuList = ""
    critic: GpuList = ""
    cost_critic: GpuList = ""
    reference: GpuList = ""
    reward_model: GpuList = ""
    cost_model: GpuList = ""
    rollout: tuple[GpuList, ...] = ()  # one entry per replica, with tp_size GPUs

    @property
    def roles(self) -> dict[Role, tuple[Gpu, ...]]:
        """Of each rank; roles without GPUs are left out."""
        named = {role: parse_gpus(getattr(self, role)) for role in get_args(Role)}
        return {role: gpus for role, gpus in named.items() if gpus}

    @property
    def replicas(self) -> tuple[tuple[Gpu, ...], ...]:
        """Of each tensor-parallel rank of each replica."""
        return tuple(map(parse_gpus, self.rollout))


class PlacementSection(Section):
    """How models and replicas share devices. See docs/placement.md."""

    mode: PlacementMode = (
        "auto"  # split: models share GPUs; colocated: replicas, too; auto: the first that fits
    )
    use_visible_gpus: bool = False  # services take GPUs that they see where they start, as in containers
    gpus: GpusConfig = GpusConfig()


ServerKind = Literal["reward", "tool", "env"]


class ServerConfig(Section):
    """An external server, as with `atoll register`. See docs/rewards.md."""

    kind: ServerKind
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    url: str
    protocol: Literal["grpc", "http", "nemo_gym", "mcp", "openenv", "trainer"]
    options: dict[str, str] = {}  # protocol options
    auth: str = ""  # "env:VARIABLE": the coordinator's environment variable with the bearer token; "": none
    concurrency: PositiveInt = 16  # concurrent calls
    timeout_s: Annotated[float, Field(gt=0)] = 60.0  # per call

    _auth_is_a_reference = field_validator("auth")(check_auth)
    _url_holds_no_password = field_validator("url")(check_url)


class ConsoleSection(Section):
    """What `atoll run` prints besides its progress."""

    samples: NonNegativeInt = 0  # number of samples to print
    every: PositiveInt = 10  # steps between samples


TrackerName = Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"]


class TrackingSection(Section):
    """Experiment trackers that receive the run's config, metrics and samples. See docs/looking_at_runs.md."""

    to: tuple[TrackerName, ...] = ()  # one process each; install with pip install 'atoll[NAME]'
    project: NonEmpty = "atoll"  # project in the tracker; in MLflow, the experiment
    samples: NonNegativeInt = 0  # number of samples to send, with their texts
    every: PositiveInt = 10  # steps between samples
    python: Path | None = None  # Python interpreter of these processes; default: the current one

    @field_validator("to")
    @classmethod
    def _each_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise ValueError(f"tracking.to = {list(names)} names a tracker twice: remove one")
        return names


class PrometheusSection(Section):
    """Every service process serves /metrics without a token. See docs/looking_at_runs.md."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # first port to try, then the next ones; 0: any free


class StoreSection(Section):
    url: str = "embedded"  # embedded, or a redis://, rediss:// or unix:// URL
    max_mb: PositiveInt = (
        4096  # MiB of samples; above it, only the next step is generated, and a checkpoint is written
    )


def section_name(role: Role) -> str:
    """The table of a role's settings."""
    return "trainer" if role == "actor" else role


class TokenLimit(NamedTuple):
    setting: str  # that sets it
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
    placement: PlacementSection = PlacementSection()
    gateway: GatewaySection = GatewaySection()
    agents: tuple[AgentConfig, ...] = ()
    servers: tuple[ServerConfig, ...] = ()
    store: StoreSection = StoreSection()
    console: ConsoleSection = ConsoleSection()
    tracking: TrackingSection = TrackingSection()
    prometheus: PrometheusSection = PrometheusSection()

    @property
    def folder(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def takes_turns(self) -> bool:
        """Whether models and replicas use the same devices, one after the other."""
        return self.placement.mode == "colocated" and self.run.mode == "train"

    @property
    def roles(self) -> dict[Role, RoleSection]:
        """The models that the recipe needs, with their settings."""
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
    def started_roles(self) -> tuple[Role, ...]:
        """Roles with processes of their own."""
        if self.run.mode == "rollout_only":
            return ()
        is_the_actors = self.reference.placement == "colocated"
        return tuple(role for role in self.roles if not (role == "reference" and is_the_actors))

    @property
    def num_replicas(self) -> int:
        return self.rollout.replicas if self.run.mode in ("train", "rollout_only") else 0

    @property
    def generates_on_cpu(self) -> bool:
        """Then models compute there, too, unless the config says otherwise."""
        return self.num_replicas > 0 and self.rollout.engine == "local"

    def model_folder(self, role: Role) -> Path:
        """The folder that a role's model is loaded from."""
        section = self.roles[role]
        path = section.path if isinstance(section, CriticSection | ReferenceSection | ScorerSection) else None
        return path or self.model.path

    @property
    def datasets(self) -> tuple[SourceConfig | ValidationSetConfig, ...]:
        """Those that samples are generated for."""
        return (*self.data.train, *self.validation.sets)

    @property
    def has_agents(self) -> bool:
        return any(dataset.agent for dataset in self.datasets)

    @property
    def needed_servers(self) -> tuple[tuple[ServerKind, str], ...]:
        """Kind and name of the external servers that graders and agents call."""
        needed: list[tuple[ServerKind, str]] = [("reward", name) for name in self.reward.servers]
        for agent in self.agents:
            needed += [("tool", name) for name in agent.tool_servers]
            needed += [("env", agent.env_server)] if agent.env_server else []
        return tuple(dict.fromkeys(needed))

    @property
    def ungraded_agents(self) -> frozenset[str]:
        """Whose sessions bring their rewards."""
        return frozenset(agent.name for agent in self.agents if agent.reward == "session")

    @property
    def asks_graders(self) -> bool:
        """Whether reward.graders score the samples of a dataset."""
        return any(dataset.agent not in self.ungraded_agents for dataset in self.datasets)

    @property
    def has_reward_service(self) -> bool:
        """Whether the run starts reward services of its own."""
        return self.reward.has_service and (self.asks_graders or self.reward.sandbox is not None)

    @property
    def sequence_limit(self) -> TokenLimit | None:
        """Limit of prompt and response tokens; None: RolloutSection.default_length."""
        if self.rollout.engine == "local":
            setting, length = "rollout.local.max_length", self.rollout.local.max_length
        else:
            setting = "rollout.sglang.context_length"
            length = int((self.rollout.sglang.model_extra or {}).get("context_length", 0))
        return TokenLimit(setting, length) if length else None

    def validation_sampling(self, entry: ValidationSetConfig) -> SamplingConfig:
        """A set's sampling, with what it takes over from training."""
        default = {"max_new_tokens": self.rollout.sampling.max_new_tokens}
        return SamplingConfig(**(default | entry.sampling.model_dump(exclude_none=True)))

    @property
    def longest_prompt(self) -> TokenLimit:
        """Longest prompt that a replica accepts: at least one token must fit after it."""
        limits = [TokenLimit("data.max_prompt_tokens", self.data.max_prompt_tokens)]
        if sequence := self.sequence_limit:
            limits.append(TokenLimit(f"{sequence.setting} - 1", sequence.tokens - 1))
        return min(limits, key=lambda limit: limit.tokens)

    @property
    def trained(self) -> tuple[Role, ...]:
        """Trained roles: those with an optimizer."""
        return tuple(role for role, section in self.roles.items() if isinstance(section, TrainerSection))

    @property
    def started_from_warmup(self) -> frozenset[Role]:
        """Roles initialized from the warmed-up policy: those without a path of their own."""
        kinds = CriticSection | ReferenceSection
        return frozenset(
            role
            for role, section in self.roles.items()
            if isinstance(section, kinds) and section.path is None
        )
