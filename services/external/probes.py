"""The probe of a reward server."""

from atoll.external.base import RewardServer
from atoll.runtime.errors import ProtocolError
from atoll.wire.types import FinishReason, Graded, GroupId, SampleId, ScoreItem

PROBE = ScoreItem(
    id=SampleId(GroupId("probe", 0, 0), 0),
    prompt="What is 17 + 29?",
    response="46",
    ground_truth="46",
    data_source="probe",
    finish_reason=FinishReason.STOP,
    response_length=1,
)


async def probe_reward(server: RewardServer) -> str:
    """Grades one plain item; a proper error for it is fine, too."""
    verdicts = await server.score([PROBE])
    if [verdict.id for verdict in verdicts] != [PROBE.id]:
        raise ProtocolError(f"{server.server.url}: got {len(verdicts)} verdicts for the probe, expected 1")
    verdict = verdicts[0]
    if isinstance(verdict, Graded):
        return f"graded the probe {verdict.value:g}"
    return f"returned a proper error for the probe ({verdict.cause})"
