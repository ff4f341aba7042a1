"""Items, verdicts and executions <-> messages of the reward service. Pure."""

from collections.abc import Sequence

from atoll.wire.info import RewardInfo
from atoll.wire.types import (
    Execution,
    FinishReason,
    Graded,
    GradingError,
    Message,
    ProgramLimits,
    ProgramStatus,
    SampleId,
    ScoreItem,
    ToolCall,
    Verdict,
)
from atoll.wire.v1 import reward_pb2

Question = tuple[str, str, str, dict[str, str]]  # prompt, ground truth, data source, extra


def encode_score_item(item: ScoreItem) -> reward_pb2.ScoreItem:
    message = reward_pb2.ScoreItem()
    put_score_item(message, item)
    return message


def put_score_item(message: reward_pb2.ScoreItem, item: ScoreItem) -> None:
    _put_question(message, item)
    _put_response(message, item)


def decode_score_item(message: reward_pb2.ScoreItem) -> ScoreItem:
    return _response(message, _question(message))


def encode_score(items: Sequence[ScoreItem], *, by_group: bool) -> reward_pb2.ScoreRequest:
    """`by_group`: what items share, as those of a group do, travels once; else each item says all itself."""
    request = reward_pb2.ScoreRequest()
    if not by_group:
        for item in items:
            put_score_item(request.items.add(), item)
        return request
    numbers: dict[tuple[str, str, str, int], int] = {}
    for item in items:
        key = (item.prompt, item.ground_truth, item.data_source, id(item.extra))
        if key not in numbers:
            numbers[key] = len(numbers)
            _put_question(request.questions.add(), item)
        message = request.items.add(question=numbers[key])
        _put_response(message, item)
    return request


def decode_score(request: reward_pb2.ScoreRequest) -> list[ScoreItem]:
    """Raises ValueError that says which item is malformed."""
    questions = [_question(question) for question in request.questions]
    if questions and (missing := [i.question for i in request.items if i.question >= len(questions)]):
        raise ValueError(f"an item has question {missing[0]}, but there are {len(questions)}")
    items = []
    for number, message in enumerate(request.items):
        try:
            items.append(_response(message, questions[message.question] if questions else _question(message)))
        except ValueError as error:
            raise ValueError(f"item {number} (the first is 0): {error}") from None
    return items


def _put_question(message: reward_pb2.ScoreItem | reward_pb2.Question, item: ScoreItem) -> None:
    message.prompt = item.prompt
    message.ground_truth = item.ground_truth
    message.data_source = item.data_source
    if item.extra:
        message.extra.update(item.extra)


def _question(message: reward_pb2.ScoreItem | reward_pb2.Question) -> Question:
    return message.prompt, message.ground_truth, message.data_source, dict(message.extra)


def _put_response(message: reward_pb2.ScoreItem, item: ScoreItem) -> None:
    message.id = str(item.id)
    message.response = item.response
    message.finish_reason = item.finish_reason.value
    message.response_length = item.response_length
    if item.messages:
        message.messages.extend(map(encode_message, item.messages))
    if item.environment:
        message.environment.update(item.environment)


def _response(message: reward_pb2.ScoreItem, question: Question) -> ScoreItem:
    prompt, ground_truth, data_source, extra = question
    return ScoreItem(
        id=_sample_id(message.id),
        prompt=prompt,
        response=message.response,
        ground_truth=ground_truth,
        data_source=data_source,
        finish_reason=_finish_reason(message.finish_reason),
        response_length=message.response_length,
        extra=extra,
        messages=tuple(map(decode_message, message.messages)),
        environment=dict(message.environment),
    )


def _sample_id(text: str) -> SampleId:
    try:
        return SampleId.parse(text)
    except ValueError:
        expected = "RUN/EPOCH/PROMPT/INDEX, such as run/0/7/1"
        raise ValueError(f"id: got {text!r}, expected {expected}") from None


def _finish_reason(text: str) -> FinishReason:
    try:
        return FinishReason(text)
    except ValueError:
        expected = ", ".join(reason.value for reason in FinishReason)
        raise ValueError(f"finish_reason: got {text!r}, expected one of {expected}") from None


def encode_message(message: Message) -> reward_pb2.Message:
    calls = [reward_pb2.ToolCall(id=id, name=name, arguments=text) for id, name, text in message.tool_calls]
    return reward_pb2.Message(
        role=message.role,
        content=message.content,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        thinking=message.thinking,
    )


def decode_message(message: reward_pb2.Message) -> Message:
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls)
    return Message(message.role, message.content, calls, message.tool_call_id, message.thinking)


def encode_verdict(verdict: Verdict) -> reward_pb2.Verdict:
    if isinstance(verdict, Graded):
        return reward_pb2.Verdict(
            id=str(verdict.id),
            graded=reward_pb2.Graded(
                value=verdict.value, components=verdict.components, reasons=verdict.reasons
            ),
        )
    return reward_pb2.Verdict(
        id=str(verdict.id),
        error=reward_pb2.GradingError(
            grader=verdict.grader,
            cause=verdict.cause,
            retryable=verdict.retryable,
            timed_out=verdict.timed_out,
        ),
    )


def decode_verdict(message: reward_pb2.Verdict, sample: SampleId) -> Verdict:
    """`sample`: the message's decoded id."""
    if message.HasField("graded"):
        graded, reasons = message.graded, message.graded.reasons
        components = {name: graded.components[name] for name in graded.components}  # dict() is slow
        return Graded(sample, graded.value, components, dict(reasons) if reasons else {})
    if message.HasField("error"):
        error = message.error
        return GradingError(sample, error.grader, error.cause, error.retryable, error.timed_out)
    return GradingError(
        sample, grader="", cause="the service sent a verdict without outcome", retryable=False
    )


def parse_score_item(content: bytes) -> ScoreItem:
    return decode_score_item(reward_pb2.ScoreItem.FromString(content))


def parse_verdict(content: bytes, sample: SampleId) -> Verdict:
    return decode_verdict(reward_pb2.Verdict.FromString(content), sample)


def encode_execute(source: str, stdin: bytes, limits: ProgramLimits) -> reward_pb2.ExecuteRequest:
    return reward_pb2.ExecuteRequest(
        source=source,
        stdin=stdin,
        timeout_s=limits.timeout_s,
        memory_bytes=limits.memory_bytes,
        output_bytes=limits.output_bytes,
        disk_bytes=limits.disk_bytes,
    )


def decode_execute(message: reward_pb2.ExecuteRequest) -> tuple[str, bytes, ProgramLimits]:
    """A limit that the message leaves out is that of `ProgramLimits`."""
    default = ProgramLimits()
    limits = ProgramLimits(
        timeout_s=message.timeout_s or default.timeout_s,
        memory_bytes=message.memory_bytes or default.memory_bytes,
        output_bytes=message.output_bytes or default.output_bytes,
        disk_bytes=message.disk_bytes or default.disk_bytes,
    )
    return message.source, message.stdin, limits


def encode_execution(execution: Execution) -> reward_pb2.ExecuteReply:
    return reward_pb2.ExecuteReply(
        status=execution.status.value,
        detail=execution.detail,
        stdout=execution.stdout,
        stderr=execution.stderr,
        wall_s=execution.wall_s,
        cpu_s=execution.cpu_s,
    )


def decode_execution(message: reward_pb2.ExecuteReply) -> Execution:
    return Execution(
        status=ProgramStatus(message.status),
        detail=message.detail,
        stdout=message.stdout,
        stderr=message.stderr,
        wall_s=message.wall_s,
        cpu_s=message.cpu_s,
    )


def encode_reward_info(info: RewardInfo) -> reward_pb2.DescribeReply:
    return reward_pb2.DescribeReply(
        graders=info.graders,
        sandbox=info.sandbox,
        max_queued=info.max_queued,
        disk_bytes=info.disk_bytes,
    )


def decode_reward_info(message: reward_pb2.DescribeReply) -> RewardInfo:
    return RewardInfo(tuple(message.graders), message.max_queued, message.sandbox, message.disk_bytes)
