"""A response to grade, as sent by tests of external servers."""

from atoll.wire.types import FinishReason, GroupId, SampleId, ScoreItem


def item(index: int = 0, response: str = "46", **extra: str) -> ScoreItem:
    return ScoreItem(
        SampleId(GroupId("run", 0, 7), index),
        "17 + 29 =",
        response,
        "46",
        "sums",
        FinishReason.STOP,
        2,
        extra,
    )
