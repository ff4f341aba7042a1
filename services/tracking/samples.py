"""The samples of a step that a tracker gets."""

from collections.abc import Sequence
from pathlib import Path

from atoll.tracking.tracker import SampleRow
from atoll.wire.codec.journal import decode_dump


def sample_rows(folder: Path, step: int, count: int) -> Sequence[SampleRow]:
    """At most `count`, spread over the groups that the step consumed; none if its dump is not kept."""
    path = folder / "dumps" / f"step-{step:06d}.pb"
    if not path.exists():
        return ()
    _, _, groups = decode_dump(path.read_bytes())
    samples = [(group.prompt, sample) for group in groups for sample in group.samples]
    chosen = samples[:: max(1, len(samples) // count)][:count]
    return [SampleRow(str(sample.id), prompt.text, sample.text, sample.score) for prompt, sample in chosen]
