"""`atoll audit`: the fate of every sample that a run issued, recomputed from its ledger and dumps.

Replays the events of runs/NAME/ledger.jsonl (coordinator/journal/ledger.py) on its own tables, one set per
lineage, and shares no code with the journal, whose bugs it is meant to find.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal

from atoll.cli.launch import active_runs
from atoll.coordinator.journal.ledger import LEDGER
from atoll.runtime.dump import DUMPS, dumps, read_dump
from atoll.runtime.errors import UserError

Event = dict[str, Any]
SHOWN = 20  # samples named in one finding


@dataclass(frozen=True, slots=True)
class SampleFate:
    kind: Literal["trained", "dropped", "pending"]
    step: int | None = None  # the step that trained on it, or whose batch was refused
    reason: str = ""  # of a drop


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The path that leads to the run's current lineage."""

    lineage: str
    fates: Mapping[str, SampleFate]  # by sample, "epoch/prompt/index"
    wrong: tuple[str, ...]  # lost or trained on twice, on the path of any lineage
    unknown: tuple[str, ...]  # what the records leave open

    @property
    def exit_code(self) -> int:
        return 1 if self.wrong else 3 if self.unknown else 0


@dataclass(slots=True)
class LineageAccount:
    """The samples on one lineage's path. Each issued one is in one of the first three tables."""

    trained: dict[str, int] = field(default_factory=dict)  # step
    dropped: dict[str, tuple[str, int | None]] = field(default_factory=dict)  # reason, refused step
    pending: set[str] = field(default_factory=set)
    draws: dict[str, int] = field(default_factory=dict)  # group -> of all prompts, once it was issued
    steps: set[int] = field(default_factory=set)  # with consumed samples
    skipped: int = 0  # draws without a group, already reported

    def __contains__(self, sample: str) -> bool:
        return sample in self.trained or sample in self.pending or sample in self.dropped

    def __iter__(self) -> Iterator[str]:
        return chain(self.trained, self.dropped, self.pending)


class Auditor:
    """Consumes the ledger's events in order."""

    def __init__(self) -> None:
        self.accounts: dict[str, LineageAccount] = {}
        self.lineage = ""  # the current one
        self.wrong: list[str] = []
        self.unknown: list[str] = []

    def take(self, event: Event) -> None:
        if event["event"] == "branch":
            self._branch(event)
        elif (account := self.accounts.get(event["lineage"])) is None:
            self.unknown.append(f"lineage {event['lineage']} has an event {event['event']} before its branch")
        elif event["event"] == "issue":
            self._issue(account, event)
        elif event["event"] == "drop":
            self._drop(account, event)
        elif event["event"] == "consume":
            self._consume(account, event)
        elif event["event"] == "commit":
            self._commit(account, event["step"])
        else:
            self.unknown.append(f"an event {event['event']!r}, which this version of Atoll does not know")

    def _issue(self, account: LineageAccount, event: Event) -> None:
        draws = _draws(event["cursor"])
        samples = list(_samples(event["samples"]))
        again = [sample for sample in samples if sample in account]
        self._find(self.wrong, again, "issued twice")
        account.pending.update(sample for sample in samples if sample not in account)
        for sample in samples:
            account.draws.setdefault(_group(sample), draws)
        self._check_draws(account, draws, "an issue")

    def _drop(self, account: LineageAccount, event: Event) -> None:
        """As in the journal: consumed samples are dropped only with their step."""
        strange = []
        for sample in _samples(event["samples"]):
            if sample in account.pending:
                account.pending.remove(sample)
            elif sample in account.trained and account.trained[sample] == event["step"]:
                del account.trained[sample]
            else:
                if sample not in account:
                    strange.append(sample)
                continue
            account.dropped[sample] = event["reason"], event["step"]
        self._find(self.unknown, strange, "dropped, but no record says that they were issued")

    def _consume(self, account: LineageAccount, event: Event) -> None:
        step, strange, dropped = event["step"], [], []
        account.steps.add(step)
        for sample in _samples(event["samples"]):
            if sample in account.trained:
                self._find(
                    self.wrong, [sample], f"trained on twice, in steps {account.trained[sample]} and {step}"
                )
            elif sample in account.dropped:
                dropped.append(sample)
            elif sample not in account.pending:
                strange.append(sample)
                account.draws.setdefault(_group(sample), 0)
            account.pending.discard(sample)
            account.trained[sample] = step
        self._find(self.unknown, dropped, f"trained on in step {step}, but dropped before")
        self._find(
            self.unknown, strange, f"trained on in step {step}, but no record says that they were issued"
        )

    def _commit(self, account: LineageAccount, step: int) -> None:
        """Every step up to a checkpoint has consumed something, if the run issues samples at all."""
        missing = [number for number in range(1, step + 1) if number not in account.steps]
        if account.draws and missing:
            account.steps.update(missing)
            self.unknown.append(
                f"no record says what these steps trained on: {_list_samples(map(str, missing))}"
            )

    def _branch(self, event: Event) -> None:
        """The tables of a new lineage: what it found at its start must match its past."""
        base = self._base(event)
        new, draws, step = LineageAccount(), _draws(event["cursor"]), event["step"]
        new.trained = {sample: trained for sample, trained in base.trained.items() if trained <= step}
        new.steps = {number for number in base.steps if number <= step}
        new.pending = set(_samples(event["pending"]))
        again = sorted(new.pending & new.trained.keys())
        self._find(
            self.wrong, again, f"pending after the restart from step {step}, which had trained on them"
        )
        lost = []
        for sample in base:
            group = _group(sample)
            if sample in new.trained or sample in new.pending:
                pass
            elif event["continues"] is None and base.draws[group] > draws:
                continue  # issued after the checkpoint: will be drawn again
            elif sample in base.dropped:
                reason, refused = base.dropped[sample]
                is_kept = refused is not None and refused <= step
                new.dropped[sample] = reason, refused if is_kept else None  # else it is another batch's step
            else:
                lost.append(sample)
            new.draws[group] = base.draws[group]
        for sample in new.pending:  # the process may have been killed before it could record the issue
            new.draws.setdefault(_group(sample), draws)
        self._find(self.wrong, sorted(lost), f"lost: issued, but gone after the restart from step {step}")
        self._check_draws(new, draws, f"the restart from step {step}")
        self.lineage = event["lineage"]
        self.accounts[self.lineage] = new

    def _base(self, event: Event) -> LineageAccount:
        """The tables that a branch starts from: the last lineage's, or the checkpoint's."""
        if event["parent"] is None:
            return LineageAccount()
        name = self.lineage if event["continues"] is not None else event["parent"]
        if name not in self.accounts:
            self.unknown.append(
                f"the ledger lacks lineage {name or event['parent']}, which the run continued"
            )
            return LineageAccount()
        return self.accounts[name]

    def _check_draws(self, account: LineageAccount, draws: int, where: str) -> None:
        """Every drawn prompt was issued: the cursor counts draws, the ledger names what was issued."""
        skipped = draws - len(account.draws)
        if skipped != account.skipped:
            difference, account.skipped = skipped - account.skipped, skipped
            self.wrong.append(
                f"after {where}, {difference} prompts were drawn and never issued"
                if difference > 0
                else f"after {where}, the data cursor is {-difference} prompts behind the issued prompts"
            )

    def check_dumps(self, dumps: Iterable[tuple[int, set[str]]]) -> None:
        """A dump holds what its step consumed, even if the trainer refused it."""
        account, consumed = self.accounts[self.lineage], defaultdict[int, set[str]](set)
        for sample, trained in account.trained.items():
            consumed[trained].add(sample)
        for sample, (_, refused) in account.dropped.items():
            if refused is not None:
                consumed[refused].add(sample)
        for step, samples in dumps:
            self._check_dump(account, step, samples, consumed[step])

    def _check_dump(self, account: LineageAccount, step: int, samples: set[str], consumed: set[str]) -> None:
        for sample in sorted(samples - consumed):
            other = account.trained.get(sample)
            if other is not None:
                self._find(
                    self.wrong, [sample], f"trained on twice: in step {other}, and in the dump of step {step}"
                )
        strange = sorted(sample for sample in samples - consumed if sample not in account.trained)
        self._find(
            self.unknown, strange, f"in the dump of step {step}, but no record says that it consumed them"
        )
        missing = sorted(consumed - samples)
        self._find(self.unknown, missing, f"consumed by step {step} as recorded, but not in its dump")

    def report(self) -> AuditReport:
        account = self.accounts.get(self.lineage, LineageAccount())
        fates = {sample: SampleFate("trained", step) for sample, step in account.trained.items()}
        fates |= {
            sample: SampleFate("dropped", step, reason) for sample, (reason, step) in account.dropped.items()
        }
        fates |= dict.fromkeys(account.pending, SampleFate("pending"))
        return AuditReport(self.lineage, fates, tuple(self.wrong), tuple(self.unknown))

    def _find(self, findings: list[str], samples: Iterable[str], what: str) -> None:
        if shown := _list_samples(samples):
            findings.append(f"{what}: {shown}")


def audit(folder: Path) -> AuditReport:
    """Audits the run in `folder`, finished or in progress."""
    batches = list(_batches(folder / DUMPS))  # read first: their content is in the ledger by then
    auditor = Auditor()
    path = folder / LEDGER
    if not path.exists():
        reason = f"{path} is missing: an earlier version of Atoll wrote none, or it was removed"
        return AuditReport("", {}, (), (reason,))
    for event in _events(path, auditor.unknown):
        auditor.take(event)
    if any(
        account.draws for account in auditor.accounts.values()
    ):  # otherwise those of a replay, with samples of another run
        auditor.check_dumps(batches)
    return auditor.report()


def _events(path: Path, unknown: list[str]) -> Iterator[Event]:
    """Skips a truncated last line, and one before a branch, which lists what was pending."""
    cut: str | None = None
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                event = json.loads(line)
            except ValueError:
                cut = f"line {number} of {path} cannot be read: {line[:80]!r}"
                continue
            if cut and event["event"] != "branch":
                unknown.append(cut)
            cut = None
            yield event


def _batches(folder: Path) -> Iterator[tuple[int, set[str]]]:
    for path in dumps(folder):
        try:
            step, groups = read_dump(path)
        except FileNotFoundError:  # the run is in progress and keeps those of the last steps
            continue
        ids = {
            sample.id
            for group in groups
            for sample in (*group.samples, *([group.baseline] if group.baseline else []))
        }
        yield step, {f"{id.group.epoch}/{id.group.prompt}/{id.index}" for id in ids}


def _samples(spans: str) -> Iterator[str]:
    """ "0/17/0-2" -> "0/17/0", "0/17/1", "0/17/2"."""
    for span in spans.split():
        group, _, indices = span.rpartition("/")
        first, _, last = indices.partition("-")
        for index in range(int(first), int(last) + 1):
            yield f"{group}/{index}"


def _spans(samples: Iterable[str]) -> Iterator[str]:
    """The inverse of `_samples`, in order."""
    parsed = sorted(tuple(map(int, sample.split("/"))) for sample in samples)
    for (epoch, prompt), members in groupby(parsed, key=lambda name: name[:2]):
        indices = [index for _, _, index in members]
        for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
            numbers = [index for _, index in run]
            yield f"{epoch}/{prompt}/{numbers[0]}-{numbers[-1]}"


def _list_samples(samples: Iterable[str]) -> str:
    names = list(samples)
    return " ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _group(sample: str) -> str:
    return sample.rpartition("/")[0]


def _draws(cursor: Mapping[str, Any] | None) -> int:
    return sum(cursor["drawn"]) if cursor else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    active_runs.add_run(parser)
    parser.add_argument("--json", action="store_true", help="print every sample as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0: every sample is accounted for; 1: some are lost or trained on twice; 3: records are
    incomplete.
    """
    if not arguments.run.is_dir():
        raise UserError(f"{arguments.run} is not a folder: give a run's, such as runs/quickstart")
    report = audit(arguments.run)
    print(_as_json(report) if arguments.json else _as_text(report))
    return report.exit_code


def _as_json(report: AuditReport) -> str:
    samples = {
        sample: {"fate": fate.kind, "step": fate.step, "reason": fate.reason}
        for sample, fate in report.fates.items()
    }
    tree = {"lineage": report.lineage, "wrong": report.wrong, "unknown": report.unknown, "samples": samples}
    return json.dumps(tree, indent=1)


def _as_text(report: AuditReport) -> str:
    """One line per step, per drop reason, and for pending samples; then findings and the total."""
    by_fate: dict[SampleFate, list[str]] = {}
    for sample, fate in report.fates.items():
        by_fate.setdefault(fate, []).append(sample)
    counts = dict.fromkeys(("trained", "dropped", "pending"), 0)
    lines = []
    for fate in sorted(by_fate, key=lambda fate: (fate.kind, fate.step or 0, fate.reason)):
        counts[fate.kind] += len(by_fate[fate])
        step = f" in step {fate.step}" if fate.step is not None else ""
        reason = f" ({fate.reason})" if fate.reason else ""
        lines.append(f"{fate.kind}{step}{reason}: {' '.join(_spans(by_fate[fate]))}")
    lines += [f"WRONG: {finding}" for finding in report.wrong]
    lines += [f"INCONCLUSIVE: {finding}" for finding in report.unknown]
    total = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return "\n".join([*lines, f"{len(report.fates)} samples: {total}"])
