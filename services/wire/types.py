"""The types of the dataflow, shared by all services.

Worked example, used throughout: run "toy", epoch 0, dataset row 7, prompt `12+34=`.
Its group has two samples, toy/0/7/0 and toy/0/7/1. Sample 1 answered `46.` at policy
version 3 in one turn, so its tree is one node:

    Trajectory(id=SampleId(GroupId("toy", 0, 7), 1), attempt=0,
               nodes=(Node(parent=-1, token_ids=[8, 10, 2], loss_mask=[1, 1, 1],
                           logprobs=[-0.1, -0.7, -0.0],
                           spans=(VersionSpan(Version("a3f0", 3), 0, 3),)),),
               turns=(Turn(node=0, finish_reason=FinishReason.STOP, text="46", origin=..., ...),),
               status=TrajectoryStatus.COMPLETED,
               rewards=(TurnReward(WHOLE, 1.0, {"exact_match": 1.0}),))

If it called a tool, the tool's tokens would be node 1 (parent 0, loss_mask 0), and what the policy said then
node 2 (parent 1) and turn 1.

Letters in shapes: T tokens, S segments, Y layers, C experts that a router chooses for a token.

Types created per sample in the coordinator are NamedTuples: frozen dataclasses take three times as long to
create and hash, and there are a dozen per sample. All others are frozen dataclasses.

long because it defines every type that crosses a service boundary.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cached_property
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
Routes = NDArray[np.integer]  # experts by number, uint8 or int16; the dtype's largest value: not recorded

NO_TEXTS: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Version:
    """A policy version: `number` counts publishes. Restoring a checkpoint opens a new lineage."""

    lineage: str
    number: int

    def __str__(self) -> str:
        return f"{self.lineage}:{self.number}"


class VersionSpan(NamedTuple):
    """Tokens [start, end) of a node were produced by `version`."""

    version: Version
    start: int
    end: int


class GroupId(NamedTuple):
    """`prompt` is the row's number over all training sources; `epoch` how often it was drawn before."""

    run: str
    epoch: int
    prompt: int

    def __str__(self) -> str:
        return f"{self.run}/{self.epoch}/{self.prompt}"

    @classmethod
    def of_validation(cls, run: str, name: str, version: int, prompt: int) -> "GroupId":
        """Of row `prompt` of a validation set. Its epoch is the version: new draws at each validation, the
        same ones if it is repeated."""
        return cls(f"{run}/val/{name}", version, prompt)

    @property
    def validation_set(self) -> str | None:
        """None: the group is of training."""
        _, is_validation, name = self.run.partition("/val/")  # a run's name has no slash
        return name if is_validation else None


class SampleId(NamedTuple):
    """Stable over restarts and re-dispatch."""

    group: GroupId
    index: int  # type: ignore[assignment]  # a tuple's own `index` is not used

    def __str__(self) -> str:
        return f"{self.group}/{self.index}"

    @classmethod
    def parse(cls, text: str) -> "SampleId":
        run, epoch, prompt, index = text.rsplit("/", 3)
        return cls(GroupId(run, int(epoch), int(prompt)), int(index))


class TurnId(NamedTuple):
    """Identifies one draw, and so a request to a rollout service. Turns of an attempt at a trajectory are
    counted in the order in which they begin; `branch` distinguishes those drawn from the same context.
    """

    sample: SampleId
    attempt: int
    turn: int = 0
    branch: int = 0

    def __str__(self) -> str:
        return f"{self.sample}/{self.attempt}/{self.turn}/{self.branch}"

    @classmethod
    def parse(cls, text: str) -> "TurnId":
        sample, attempt, turn, branch = text.rsplit("/", 3)
        return cls(SampleId.parse(sample), int(attempt), int(turn), int(branch))


class FinishReason(Enum):
    STOP = "stop"  # a stop token or stop string; the stop token is part of the response
    LENGTH = "length"
    ABORT = "abort"


class PauseMode(IntEnum):
    """How running sequences are paused. Queued and new requests are held."""

    WAIT = 1  # they run to their end
    IN_PLACE = 2  # they stop between two tokens and later continue with their keys and values
    RETRACT = 3  # they return to the queue; their keys and values are recomputed later
    ABORT = 4  # they end at once with partial output, like queued ones; new ones are held


class EngineMemory(IntEnum):
    """What an engine gives back while models use its device."""

    WEIGHTS = 1
    CACHE = 2  # keys and values, CUDA graphs


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Logprobs on the wire are those of this distribution."""

    max_new_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0  # of the counter-based stream per (seed, sample, position)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A rendered and tokenized dataset row."""

    id: GroupId
    token_ids: Int32  # [T] none if an agent gets the row
    text: str
    ground_truth: str
    data_source: str
    extra: Mapping[str, str] = field(default_factory=dict)
    agent: str = ""  # that gets the row; "": the policy answers in one turn
    messages: tuple["Message", ...] = ()  # for the agent; neither trainers nor dumps have them


BELOW_PROMPT: Final = -1  # parent of a node that follows the group's prompt
NEW_CONVERSATION: Final = -2  # parent of a node with nothing above it, such as a sub-agent's system prompt
WHOLE: Final = -1  # node of a reward that is the trajectory's, not a turn's


class Node(NamedTuple):
    """One delta of tokens in a trajectory's tree: produced by the policy, or inserted before a turn."""

    parent: int  # an earlier node, BELOW_PROMPT or NEW_CONVERSATION
    token_ids: Int32  # [T]
    loss_mask: Bool  # [T] True if the policy produced the token
    logprobs: Float32  # [T] of the sampling distribution; 0 where loss_mask is False
    spans: tuple[VersionSpan, ...]  # together, the tokens whose loss_mask is True
    routes: Routes | None = None  # [N, Y, C] of the N tokens before its last one, which may lie above it

    @property
    def num_produced(self) -> int:
        """Tokens that the policy produced."""
        return sum(end - start for _, start, end in self.spans)

    @property
    def oldest_number(self) -> int | None:
        """Number of the oldest version that produced one of its tokens; None if the policy produced none."""
        numbers = [version.number for version, start, end in self.spans if start < end]
        return min(numbers) if numbers else None


class TurnReward(NamedTuple):
    """A reward for the turn that produced `node`, or for the trajectory: then `node` is WHOLE."""

    node: int
    value: float
    components: Mapping[str, float]
    reasons: Mapping[str, str] = NO_TEXTS  # by component, if its grader gave one


class Origin(NamedTuple):
    """Who generated a turn."""

    replica: str
    incarnation: str


class Turn(NamedTuple):
    """One call of the policy. A trajectory's turns are in the order in which they began."""

    node: int  # what it produced
    finish_reason: FinishReason
    text: str  # without the stop token or stop string
    origin: Origin
    started: float  # Unix seconds
    finished: float  # Unix seconds
    number: int = 0  # in its TurnId
    branch: int = 0  # in its TurnId
    untrained: bool = False  # kept without weight in the loss, as a title, a summary or a sub-agent may be


class TrajectoryStatus(Enum):
    COMPLETED = "completed"  # it came to its own end
    TRUNCATED = "truncated"  # a limit ended it: tokens, turns or time
    ABORTED = "aborted"  # aborted; not trained on


_ABORTED: Final = TrajectoryStatus.ABORTED  # looking it up takes as long as the rest of a look at a sample

STATUS_AFTER: Final = {
    FinishReason.STOP: TrajectoryStatus.COMPLETED,
    FinishReason.LENGTH: TrajectoryStatus.TRUNCATED,
    FinishReason.ABORT: TrajectoryStatus.ABORTED,
}  # of a trajectory that ended with its last turn


class ToolCall(NamedTuple):
    id: str
    name: str
    arguments: str  # JSON, as the policy wrote it


class Message(NamedTuple):
    """One message of a conversation, as chat APIs have them."""

    role: str  # "system", "user", "assistant" or "tool"
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # of the call that a tool's message answers
    thinking: str = ""  # of the assistant, before its content


class Trajectory(NamedTuple):
    """One sample of a group: a tree of token deltas, the turns that made it, and its rewards."""

    id: SampleId
    attempt: int
    nodes: tuple[Node, ...]
    turns: tuple[Turn, ...]
    status: TrajectoryStatus
    rewards: tuple[TurnReward, ...] = ()
    reason: str = ""  # why it ended, if its turns do not say so: a limit's name, an environment's words
    messages: tuple[Message, ...] = ()  # of several turns; those of a single one are its prompt and its text
    environment: Mapping[str, str] = NO_TEXTS  # the environment's output, for graders

    @property
    def score(self) -> float:
        return sum(reward.value for reward in self.rewards)

    @property
    def finish_reason(self) -> FinishReason:
        """Of the last turn."""
        return self.turns[-1].finish_reason

    @property
    def text(self) -> str:
        """Of the last turn."""
        return self.turns[-1].text

    @property
    def response(self) -> str:
        """What graders score."""
        return self.messages[-1].content if self.messages else self.text

    @property
    def num_produced(self) -> int:
        """Tokens that the policy produced; those of prompts, templates and tools do not count."""
        num_produced = 0
        for node in self.nodes:
            for _, start, end in node.spans:
                num_produced += end - start
        return num_produced

    def versions(self) -> set[Version]:
        """The versions that produced its loss-masked tokens."""
        return {span.version for node in self.nodes for span in node.spans if span.end > span.start}

    def turn_numbers(self) -> list[int]:
        """Of each turn that has tokens and may be trained on: the number of the version that produced its
        oldest one."""
        nodes: Iterable[Node] = self.nodes
        if untrained := self.untrained_nodes():
            nodes = [node for index, node in enumerate(nodes) if index not in untrained]
        return [number for node in nodes if (number := node.oldest_number) is not None]

    def untrained_nodes(self) -> Collection[int]:
        """Those whose tokens have no weight in the loss, however fresh they are."""
        if self.status is _ABORTED:
            return range(len(self.nodes))
        if len(self.turns) == 1 and not self.turns[0].untrained:
            return ()  # as most do
        return [turn.node for turn in self.turns if turn.untrained]

    def staleness(self, current: Version, oldest: int = 0) -> int:
        """The version being trained minus the version of the oldest loss-masked token, apart from turns with
        a token of a version before number `oldest`.

        Numbers continue across the lineages of one run: the journal gives back only samples whose
        versions lie on the path that led to `current`.
        """
        numbers = [number for number in self.turn_numbers() if number >= oldest]
        return current.number - min(numbers, default=current.number)

    def add_reward(self, reward: TurnReward) -> "Trajectory":
        return Trajectory(*self[:5], (*self.rewards, reward), *self[6:])  # _replace takes longer


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All samples of one prompt, in the order of their index."""

    prompt: Prompt
    samples: tuple[Trajectory, ...]
    baseline: Trajectory | None = (
        None  # the greedy one, scored and not trained on; its index follows the others'
    )

    def ids(self) -> tuple[SampleId, ...]:
        """The baseline's, too."""
        return tuple(sample.id for sample in (*self.samples, self.baseline) if sample is not None)


@dataclass(frozen=True, eq=False)
class Segments:
    """Ragged token segments that form trees; never padded.

    Segment s owns tokens [offsets[s], offsets[s+1]) and attends to itself (causally) and to all
    tokens of its ancestors. A group of two samples that share a prompt is three segments:
    parents [-1, 0, 0]. Segments of one group stay on one data-parallel rank.
    """

    token_ids: Int32  # [T]
    offsets: Int64  # [S+1]
    parents: Int32  # [S] -1 for a root; a parent comes before its children
    groups: Int32  # [S] ascending
    routes: Routes | None = None  # [T, Y, C] experts for the model to use; None: all of its own choice

    def routes_of(self, tokens: Int64 | slice) -> Routes | None:
        return None if self.routes is None else self.routes[tokens]

    def part(self, first: int, end: int) -> tuple["Segments", slice]:
        """Segments [first, end), which hold whole trees, as segments of their own; and the slice of the
        flat token arrays that they own."""
        tokens = slice(int(self.offsets[first]), int(self.offsets[end]))
        parents = self.parents[first:end]
        part = Segments(
            token_ids=self.token_ids[tokens],
            offsets=self.offsets[first : end + 1] - self.offsets[first],
            parents=np.where(parents >= 0, parents - first, -1).astype(np.int32),
            groups=self.groups[first:end],
            routes=self.routes_of(tokens),
        )
        return part, tokens

    @cached_property
    def positions(self) -> Int32:
        """[T] position of each token in its own sequence: ancestors' tokens count."""
        starts = np.zeros(len(self.parents), np.int64)
        lengths = np.diff(self.offsets)
        for s, parent in enumerate(self.parents):  # parents come first
            if parent >= 0:
                starts[s] = starts[parent] + lengths[parent]
        flat = np.arange(len(self.token_ids)) - np.repeat(self.offsets[:-1] - starts, lengths)
        return flat.astype(np.int32)

    @cached_property
    def predecessors(self) -> Int64:
        """[T] flat index of the token that predicts each token; -1 for the first token of a root."""
        before = np.arange(len(self.token_ids), dtype=np.int64) - 1
        is_empty = np.diff(self.offsets) == 0
        last = self.offsets[1:] - 1  # token of each segment, or of what is above an empty one
        for s in np.flatnonzero(is_empty):  # parents come first
            last[s] = last[self.parents[s]] if self.parents[s] >= 0 else -1
        parents = self.parents[~is_empty]
        before[self.offsets[:-1][~is_empty]] = np.where(parents >= 0, last[parents], -1)
        return before


# What one update consumes. The loss is the sum over tokens of loss_weights * token loss: the normalisation
# (over the whole minibatch, all ranks) is already in the weights, so it does not matter how it is cut.


@dataclass(frozen=True, eq=False)
class PolicyBatch:
    """For the actor, by the policy loss of the run."""

    segments: Segments
    samples: Int32  # [T] number of each token's sample, ascending; -1 in what samples share, as prompts
    loss_weights: Float32  # [T] 0 for prompt, tool and template tokens
    advantages: Float32  # [T] 0 where loss_weights is 0; importance weights are multiplied in
    rollout_logprobs: Float32  # [T] 0 where loss_weights is 0
    old_logprobs: Float32 | None  # [T]; None: detached from the same forward pass
    ref_logprobs: Float32 | None  # [T] under the reference policy; None: not sent, or computed beside


@dataclass(frozen=True, eq=False)
class ValueBatch:
    """For a critic. A token's value is that of the state before it."""

    segments: Segments
    loss_weights: Float32  # [T]
    values: Float32  # [T] those that the advantages came from: the clip is around them
    returns: Float32  # [T] the targets


@dataclass(frozen=True, eq=False)
class SupervisedBatch:
    """For the actor's warm-up: negative log-likelihood."""

    segments: Segments
    loss_weights: Float32  # [T]


Batch = PolicyBatch | ValueBatch | SupervisedBatch


@dataclass(frozen=True, slots=True)
class StepKey:
    """Names one update; a repeated call with the same key answers from its record."""

    lineage: str
    step: int
    minibatch: int
    role: str


class ScoreItem(NamedTuple):
    """One trajectory to grade. In a grader's tests, set only what it reads, such as `response`,
    `ground_truth`.
    """

    id: SampleId = SampleId(GroupId("", 0, 0), 0)
    prompt: str = ""
    response: str = ""  # of the last turn; of an agent's session, of its main conversation's
    ground_truth: str = ""
    data_source: str = ""
    finish_reason: FinishReason = FinishReason.STOP  # of the last turn
    response_length: int = 0  # tokens that the policy produced, in all turns
    extra: Mapping[str, str] = NO_TEXTS
    messages: tuple[Message, ...] = ()  # of several turns; of a single one prompt and response are all
    environment: Mapping[str, str] = NO_TEXTS  # the environment's output


@dataclass(frozen=True, slots=True)
class Grade:
    """One grader's verdict on one response. A reason is a kind, which is counted, and perhaps a detail:
    "timeout: case 3"."""

    value: float
    reason: str = ""


class Graded(NamedTuple):
    id: SampleId
    value: float
    components: Mapping[str, float]
    reasons: Mapping[str, str] = NO_TEXTS  # by component, where its grader gave one


@dataclass(frozen=True, slots=True)
class GradingError:
    """A reward that could not be computed, and why; never a silent 0."""

    id: SampleId
    grader: str
    cause: str
    retryable: bool
    timed_out: bool = False  # the grader's deadline has passed


Verdict = Graded | GradingError


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Of one program in the sandbox."""

    timeout_s: float = 5.0  # wall time
    memory_bytes: int = 512 << 20  # address space
    output_bytes: int = 1 << 20  # of stdout and stderr, each
    disk_bytes: int = 16 << 20  # of the directory that it may write to


class ProgramStatus(Enum):
    """How a program in the sandbox ended."""

    OK = "ok"  # exit code 0
    COMPILE_ERROR = "compile error"
    EXCEPTION = "exception"  # not caught
    EXIT_CODE = "exit code"  # it asked for another one than 0
    SIGNAL = "signal"  # the kernel ended it: a crash, or a system call that is not allowed
    TIMEOUT = "timeout"
    OUTPUT_LIMIT = "output limit"


@dataclass(frozen=True, slots=True)
class Execution:
    """What a program in the sandbox did."""

    status: ProgramStatus
    detail: str  # the exception, the code, the signal
    stdout: bytes
    stderr: bytes
    wall_s: float
    cpu_s: float


class SessionEnd(Enum):
    """Why a session of an agent ended."""

    DONE = "done"  # its agent came to its own end
    TURNS = "turns"  # a limit, as the next four
    TOKENS = "tokens"
    SECONDS = "seconds"
    VERSIONS = "versions"
    CONTEXT = "context"  # the conversation outgrew the model's context, and the agent gave up
    AGE = "age"  # its turns would have become too old to train on
    AGENT_FAILED = "agent failed"
    ENVIRONMENT_FAILED = "environment failed"
    CANCELLED = "cancelled"


class SessionId(NamedTuple):
    """One attempt at a sample, in which an agent asks for its turns."""

    sample: SampleId
    attempt: int

    def __str__(self) -> str:
        return f"{self.sample}/{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> "SessionId":
        sample, attempt = text.rsplit("/", 1)
        return cls(SampleId.parse(sample), int(attempt))


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """0: no limit."""

    turns: int = 0
    tokens: int = 0  # that the policy produces


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """A session to open. The holder of a key may do what it is for, while the session is open."""

    id: SessionId
    agent_key: str  # to ask for turns
    reward_key: str  # to set rewards
    sampling: Sampling
    limits: SessionLimits


@dataclass(frozen=True, slots=True)
class SessionReward:
    """A reward from outside, set with a session's reward key. Several of a session add up."""

    component: str  # that it is reported as
    value: float
    turn: tuple[int, int] | None = None  # number and branch of the turn that it is for; None: the session


@dataclass(frozen=True, slots=True, eq=False)
class TurnRecord:
    """A request of a session and what was drawn for it, as the store keeps them: a turn is finished once it
    is there. A session's records are in the order in which they were written."""

    number: int  # in the TurnIds of what was drawn
    request: bytes  # digest of the request's body
    parent: int  # record whose reply the conversation continues; -1: a conversation of its own
    parent_branch: int  # which of its replies
    head: bytes  # digest of the conversation's system prompt and tools
    has_tools: bool
    inserted_ids: (
        Int32  # [T] between what the parent produced and what was drawn; of a root, its whole prompt
    )
    messages: tuple[Message, ...]  # that these ids stand for
    cause: str  # why it did not continue the last turn; "": it did
    drawn: tuple[Trajectory, ...]  # a single turn each, by branch
    chains: tuple[bytes, ...]  # by branch: digest of the conversation up to and with the reply


@dataclass(frozen=True, slots=True)
class AgentTask:
    """A session for an agent function to hold."""

    session: SessionId
    agent: str  # name of one of [[agents]]
    url: str  # of the gateway: chat APIs below /v1
    agent_key: str = field(repr=False)  # to ask for turns; "": the session's holder already has it
    reward_key: str = field(repr=False)  # to set rewards
    model: str  # as the gateway calls it
    messages: tuple[Message, ...]  # of the dataset's row, as the next three
    ground_truth: str
    data_source: str
    extra: Mapping[str, str] = field(default_factory=dict)
    servers: tuple["ServerAccess", ...] = ()  # that the built-in loops call


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """How an agent function ended."""

    cause: str = ""  # why it failed, such as "ValueError: no such tool"; "": it returned
    reward: float | None = None  # that it returned, if any; finite
    environment_failed: bool = False  # it was not the agent's fault
    environment: Mapping[str, str] = field(default_factory=dict)  # what graders read of it, such as files


@dataclass(frozen=True, slots=True, eq=False)
class TurnRequest:
    """Draw one turn for each id, all after the same context, which is computed once."""

    ids: tuple[TurnId, ...]  # of one group
    context_ids: Int32  # [T] everything that the model sees before the turn
    sampling: Sampling
    session: str = ""  # of the turn; its keys and values are kept for the next turn; "": none
    num_routed: int = 0  # first tokens of the context whose routes earlier turns recorded

    @property
    def group(self) -> GroupId:
        return self.ids[0].sample.group

    def first_route(self, id: TurnId) -> int:
        """Position from which on a turn records routes: its first id alone records those of the context."""
        return self.num_routed if id == self.ids[0] else len(self.context_ids)


@dataclass(frozen=True, slots=True)
class UndrawnTurn:
    """A turn of a session that was asked for and is not drawn."""

    id: TurnId
    reason: str
    end: SessionEnd | None  # its session is over; None: the turn may be requested again


# Two-dimensional pieces of canonical (Hugging Face named) tensors, and if a process keeps them.
# A one-dimensional tensor of n elements is n rows of one column. `offset` and `stride` count elements
# in the process's own flat buffer number `buffer`; `stride` is the distance between two rows there.
BOX = np.dtype(
    [
        ("tensor", np.int32),  # index into ShardLayout.tensors
        ("row", np.int64),  # first row
        ("rows", np.int64),
        ("column", np.int64),  # first column
        ("columns", np.int64),
        ("buffer", np.int32),
        ("offset", np.int64),
        ("stride", np.int64),
    ]
)


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """The shard layout of one process: where it keeps its part of the model."""

    tensors: tuple[str, ...]  # canonical names
    boxes: NDArray[np.void]  # [N] of BOX


# One box of a tensor on its way from the trainer rank `source` to rank `target` of a replica. In between
# it lies row-major and dense at element `stream` of what the source writes for the replica class.
TRANSFER = np.dtype(
    [
        ("source", np.int32),
        ("target", np.int32),
        ("tensor", np.int32),  # index into Plan.tensors
        ("row", np.int64),
        ("rows", np.int64),
        ("column", np.int64),
        ("columns", np.int64),
        ("source_buffer", np.int32),
        ("source_offset", np.int64),
        ("source_stride", np.int64),
        ("target_buffer", np.int32),
        ("target_offset", np.int64),
        ("target_stride", np.int64),
        ("round", np.int32),  # the part of the version that it belongs to
        ("stream", np.int64),
    ]
)


@dataclass(frozen=True, eq=False)
class Plan:
    """How the trainer's shards reach the replicas of one class (those with equal shard layouts).

    A version travels in rounds. In one round a source sends to one target rank at most, and a target rank
    hears one source at most, so whatever both have to enter together cannot deadlock.
    """

    id: str  # digest of its content
    tensors: tuple[str, ...]  # canonical names
    transfers: NDArray[np.void]  # [N] of TRANSFER, ordered by source, round, then stream


@dataclass(frozen=True, slots=True)
class Membership:
    """The replicas of one class that receive a push together. A new epoch begins whenever one leaves, and
    whatever belongs to an older one is void."""

    epoch: int
    num_members: int
    member: int = 0  # which of them this replica is


@dataclass(frozen=True, slots=True)
class StreamManifest:
    """What one trainer rank sends to one target rank of all replicas of a class in one round: a part of its
    stream."""

    source: int  # trainer rank
    location: str  # where readers find it, in the words of the transport
    offset: int  # byte at that location where the part begins
    num_bytes: int  # of the part as it travels
    plan_id: str
    part: int  # round of the plan
    checksum: int  # of the part's bytes in the serving dtype, see weights/boxes.py
    delta: bool = False  # only what differs from the version before travels


@dataclass(frozen=True, slots=True, eq=False)
class PushPart:
    """What one replica receives in one call: a part of a version, or all of it."""

    version: Version
    streams: Sequence[StreamManifest]  # those of its plan
    plan: Plan | None  # of its class; None: sent before
    membership: Membership


@dataclass(frozen=True, slots=True, eq=False)
class PublishRequest:
    """Which part of a version the trainer sends, and to whom."""

    version: Version
    dtype: str  # that the replicas serve with
    members: Mapping[str, Membership]  # of each plan that it is sent by, by the plan's id
    new_plans: Sequence[Plan]  # those that the trainer has not been sent before
    part: int  # round of the plans


@dataclass(frozen=True, slots=True, eq=False)
class PublishedPart:
    """One part of a version, as one trainer rank (or, merged, all of them) wrote it."""

    streams: tuple[StreamManifest, ...]
    num_bytes: int  # written for this part; 0 where the bytes equal those of the last publish
    last: bool  # there is no further part


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Low-rank adapters on the matrices of some names: alpha / rank times B A is added to each."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # such as "q_proj"


@dataclass(frozen=True, slots=True)
class ReceiverSetup:
    """How versions come to a replica."""

    transport: str  # as in [weights]
    deadline_s: float  # time for a part to arrive
    staging: str  # as in [weights]
    lora: LoraSpec | None = None  # adapters, where they alone are pushed
    takes_turns: bool = False  # nothing is generated during a push: it goes into the live weights


@dataclass(frozen=True, slots=True)
class CheckpointWrite:
    """Size and duration of writing a model's part of a checkpoint."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ServiceEntry:
    """A registered service; `incarnation` is new at every start."""

    role: str
    name: str
    incarnation: str
    address: str


ServerKind = Literal["reward", "tool", "env"]


@dataclass(frozen=True, slots=True)
class ExternalServer:
    """An external server. Several of one kind and name share its load."""

    kind: ServerKind
    name: str
    url: str
    protocol: str  # "grpc", "http", "nemo_gym", "mcp", "openenv", "trainer"
    options: Mapping[str, str] = field(default_factory=dict)  # of the protocol
    auth: str = ""  # "env:VARIABLE" of the coordinator's environment: the bearer token; "": none
    concurrency: int = 16  # calls at once
    timeout_s: float = 60.0  # of one call
    address: str = ""  # that the coordinator has checked and calls whatever `url`'s host says; "": that host

    def __str__(self) -> str:
        return f"{self.kind} server {self.name} at {self.url}"


SANDBOX: Final = "(sandbox)"  # name of a run's own reward services as tool servers; no other can have it


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """What it takes to call an external server from another process than the coordinator's."""

    server: ExternalServer
    token: str | None = field(repr=False)  # for its `auth`


@dataclass(frozen=True, slots=True)
class ServerHealth:
    server: ExternalServer
    healthy: bool
    cause: str = ""  # reason for getting no calls


@dataclass(frozen=True, slots=True)
class JournalIndex:
    """The coordinator's journal but for its payloads, in the form of coordinator/journal/scripts.py."""

    issued: bytes  # "sample number first last sample number ..."
    finished: bytes  # "sample number payload last attempt sample ..."
    cursor: str | None  # if the data stood after the last issue
    lineages: tuple[str, ...]
