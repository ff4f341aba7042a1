"""Responses to grade, for tests of graders."""

from atoll.wire.types import FinishReason, Grade, GroupId, SampleId, ScoreItem


def item(
    response: str,
    ground_truth: str = "46",
    *,
    prompt: str = "12+34=",
    data_source: str = "arithmetic",
    tokens: int = 3,
    **extra: str,
) -> ScoreItem:
    return ScoreItem(
        id=SampleId(GroupId("toy", 0, 7), 1),
        prompt=prompt,
        response=response,
        ground_truth=ground_truth,
        data_source=data_source,
        finish_reason=FinishReason.STOP,
        response_length=tokens,
        extra=extra,
    )


def graded(result: float | Grade) -> tuple[float, str]:
    """Value and kind of the reason."""
    if isinstance(result, Grade):
        return result.value, result.reason.partition(":")[0]
    return result, ""
