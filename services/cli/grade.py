"""`atoll grade GRADER DATA`: grades the responses in a file as a run would; needs no run."""

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

from atoll.config.load import load_grader
from atoll.config.schema import GraderConfig, RewardSection
from atoll.coordinator.data.dataset_rows import Dataset, DatasetRow, read_graded_rows
from atoll.reward.service import start_panel
from atoll.runtime.errors import UserError
from atoll.wire.types import Graded, GroupId, SampleId, ScoreItem, Verdict

SHOWN = 20  # rows, if not told
SHOWN_ERRORS = 5  # kinds
SHOWN_CHARACTERS = 60  # of a response: its end
EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "grader", metavar="GRADER", help="FILE.py:function, or a built-in grader such as maths"
    )
    parser.add_argument(
        "data",
        type=Path,
        metavar="DATA",
        help="a dataset whose rows have a response: .jsonl, .json, .parquet",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a parameter of the grader, or its deadline_s or concurrency; repeatable",
    )
    parser.add_argument("-n", "--num", type=int, default=SHOWN, help=f"rows to print; default: {SHOWN}")
    parser.add_argument(
        "--jsonl", action="store_true", help="print every row as a line of JSON, and no summary"
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 if a row could not be graded."""
    config = load_grader(arguments.grader, arguments.set)
    if config.server is not None:
        raise UserError(f"{config.name}: test a server with `atoll conformance URL --items FILE`")
    rows = read_graded_rows(Dataset(arguments.data))
    items = [_item(number, row, response, config.file) for number, (row, response) in enumerate(rows)]
    verdicts = asyncio.run(_grade(config, items))
    if arguments.jsonl:
        for verdict in verdicts:
            print(json.dumps(_record(verdict), ensure_ascii=False))
    else:
        for item, verdict in list(zip(items, verdicts, strict=True))[: arguments.num]:
            print(_line(item, verdict))
        print(_summary(verdicts))
    return 0 if all(isinstance(verdict, Graded) for verdict in verdicts) else EXIT_FAILED


async def _grade(config: GraderConfig, items: Sequence[ScoreItem]) -> list[Verdict]:
    """In the order of the items."""
    verdicts: dict[SampleId, Verdict] = {}
    async with AsyncExitStack() as resources:
        panel, _ = await start_panel(RewardSection(graders=(config,)), resources)
        resources.push_async_callback(panel.retire)
        async with aclosing(panel.verdicts(items)) as ready:
            async for some in ready:
                verdicts |= {verdict.id: verdict for verdict in some}
                if sys.stderr.isatty():
                    print(f"\r{len(verdicts)} of {len(items)} rows", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return [verdicts[item.id] for item in items]


def _item(number: int, row: DatasetRow, response: str, file: str) -> ScoreItem:
    """Without a tokenizer, a response's length is counted in words. `file`: responses are its content."""
    return ScoreItem(
        id=SampleId(GroupId("grade", 0, number), 0),
        prompt="\n".join(message.content for message in row.messages),
        response=response,
        ground_truth=row.ground_truth,
        data_source=row.data_source,
        response_length=len(response.split()),
        extra=row.extra,
        environment={file: response} if file else {},
    )


def _line(item: ScoreItem, verdict: Verdict) -> str:
    number = f"row {item.id.group.prompt:<5}"
    if not isinstance(verdict, Graded):
        return f"{number} ERROR   {verdict.cause}"
    end = "".join(c if c.isprintable() else " " for c in item.response[-SHOWN_CHARACTERS:])
    cut = "..." if len(item.response) > SHOWN_CHARACTERS else ""
    return f"{number} {verdict.value:7.3f}  {_reason(verdict) or '-':30}  {cut}{end}".rstrip()


def _reason(verdict: Graded) -> str:
    return "; ".join(verdict.reasons.values())


def _record(verdict: Verdict) -> dict[str, object]:
    row: dict[str, object] = {"row": verdict.id.group.prompt}
    if not isinstance(verdict, Graded):
        return row | {"error": verdict.cause, "retryable": verdict.retryable}
    return row | {"score": verdict.value, "components": dict(verdict.components), "reason": _reason(verdict)}


def _summary(verdicts: Sequence[Verdict]) -> str:
    graded = [verdict for verdict in verdicts if isinstance(verdict, Graded)]
    lines = [f"{len(verdicts)} rows, {len(verdicts) - len(graded)} with an error"]
    if graded:
        scores = [verdict.value for verdict in graded]
        lines[0] += f"; score {sum(scores) / len(scores):.3f} on average, {min(scores):g} to {max(scores):g}"
    names = {name for verdict in graded for name in verdict.components}
    lines += [
        f"  {name} {sum(verdict.components[name] for verdict in graded) / len(graded):.3f}"
        for name in sorted(names)
    ]
    causes = Counter(verdict.cause for verdict in verdicts if not isinstance(verdict, Graded))
    lines += [f"  error: {cause}: {count}" for cause, count in causes.most_common(SHOWN_ERRORS)]
    kinds = Counter(reason.partition(":")[0] for verdict in graded if (reason := _reason(verdict)))
    lines += [f"  {kind}: {count}" for kind, count in kinds.most_common()]
    return "\n".join(lines)
