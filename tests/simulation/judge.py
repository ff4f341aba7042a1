"""What must hold at the end of a run, by what its weights are made of and by its own audit."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from atoll.coordinator.run_data import read_data
from tests.simulation.runs import Outcome, Scene


def faults(scene: Scene, outcome: Outcome) -> list[str]:
    """Sentences; none if nothing was lost, nothing trained on twice and no prompt skipped."""
    return [
        *_twice(outcome),
        *_torn(scene, outcome),
        *_steps(scene, outcome),
        *_skipped(scene, outcome),
        *_audits(scene, outcome),
    ]


def _twice(outcome: Outcome) -> Iterator[str]:
    steps = defaultdict(list)
    for step, samples in outcome.history:
        for sample in samples:
            steps[sample].append(step)
    for sample, trained in steps.items():
        if len(trained) > 1:
            yield f"{sample} was trained on in the steps {trained}"


def _torn(scene: Scene, outcome: Outcome) -> Iterator[str]:
    wanted = scene.config.coordinator.samples_per_prompt
    for step, samples in outcome.history:
        for group, number in Counter(sample.rpartition("/")[0] for sample in samples).items():
            if number != wanted:
                yield f"step {step} trained on {number} samples of {group}, expected {wanted}"


def _steps(scene: Scene, outcome: Outcome) -> Iterator[str]:
    steps = [step for step, _ in outcome.history]
    missing = set(range(1, scene.config.run.steps + 1)) - set(steps) - scene.fate.refused_steps
    if missing or steps != sorted(set(steps)):
        yield f"the weights are made of the steps {steps}, without {sorted(missing)}, which were not refused"


def _skipped(scene: Scene, outcome: Outcome) -> Iterator[str]:
    """Every prompt drawn before the last that was trained on was trained on, too, or had a reason to go."""
    left = {sample.rpartition("/")[0] for _, samples in outcome.history for sample in samples}
    prompts = read_data(scene.config).prompts
    assert prompts is not None
    while left:
        (prompt,) = prompts.draw(1)
        group = f"{prompt.id.epoch}/{prompt.id.prompt}"
        if group in left:
            left.remove(group)
        elif group not in scene.fate.may_drop:
            yield f"{group} was drawn and never trained on, and nothing was wrong with it"


def _audits(scene: Scene, outcome: Outcome) -> Iterator[str]:
    """Whenever the audit looked, all was accounted for; in the end it says what the trainer says."""
    for number, report in enumerate(outcome.audits):
        yield from (f"audit {number}: {finding}" for finding in (*report.wrong, *report.unknown))
    fates = outcome.audits[-1].fates
    without_loss = scene.config.coordinator.samples_per_prompt  # index of a greedy baseline
    audited = {
        sample: fate.step
        for sample, fate in fates.items()
        if fate.kind == "trained" and not sample.endswith(f"/{without_loss}")
    }
    recorded = {sample: step for step, samples in outcome.history for sample in samples}
    if audited != recorded:
        yield f"audit and trainer do not agree on {sorted(dict(audited.items() ^ recorded.items()))}"
    for sample, fate in fates.items():
        if fate.kind == "pending":
            yield f"{sample} is pending at the end of the run"
        elif fate.kind == "dropped" and sample.rpartition("/")[0] not in scene.fate.may_drop:
            yield f"{sample} was dropped ({fate.reason}), and nothing was wrong with it"
