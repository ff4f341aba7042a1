"""`atoll conformance URL`: tests an external server before it is registered; needs no run."""

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from atoll.cli import server_arguments
from atoll.config.load import secret
from atoll.external.conformance import Check, conformance
from atoll.runtime.errors import UserError
from atoll.wire.types import ExternalServer, FinishReason, GroupId, SampleId, ScoreItem

EXIT_FAILED = 1


class _ItemRow(BaseModel):
    """One line of --items."""

    model_config = ConfigDict(extra="forbid")

    prompt: str
    response: str
    ground_truth: str = ""
    data_source: str = ""
    extra: dict[str, str] = {}


_ROW = TypeAdapter(_ItemRow)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="as for atoll register")
    parser.add_argument("--kind", choices=server_arguments.KINDS, default="reward")
    server_arguments.add_arguments(parser)
    parser.add_argument(
        "--items",
        type=Path,
        metavar="FILE.jsonl",
        help="JSON lines to grade (prompt, response, ground_truth, data_source, extra); default: sums",
    )
    parser.add_argument(
        "--not-deterministic",
        action="store_true",
        help="allow different rewards for the same item, as from an LLM judge",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 if a check failed."""
    server = server_arguments.parse_server(arguments, "conformance")
    token = secret(arguments.auth) if arguments.auth else None
    items = _items(arguments.items) if arguments.items else []
    checks = asyncio.run(_check(server, token, items, not arguments.not_deterministic, arguments.json))
    passed = sum(check.passed for check in checks)
    if not arguments.json:
        print(f"{passed} of {len(checks)} checks passed")
    return 0 if passed == len(checks) else EXIT_FAILED


async def _check(
    server: ExternalServer, token: str | None, items: Sequence[ScoreItem], deterministic: bool, as_json: bool
) -> list[Check]:
    checks = []
    async for check in conformance(server, token, items, deterministic):
        checks.append(check)
        if as_json:
            print(json.dumps({"check": check.name, "passed": check.passed, "said": check.said}), flush=True)
        else:
            print(f"{'pass' if check.passed else 'FAIL'}  {check.name}: {check.said}", flush=True)
    return checks


def _items(path: Path) -> list[ScoreItem]:
    try:
        lines = path.read_text().split(
            "\n"
        )  # JSON may contain characters that str.splitlines treats as line ends
    except OSError as error:
        raise UserError(f"--items {path}: {error.strerror}") from None
    rows = [_row(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise UserError(f"--items {path}: got no row, expected at least one")
    return [
        ScoreItem(
            id=SampleId(GroupId("conformance", 0, number), 0),
            prompt=row.prompt,
            response=row.response,
            ground_truth=row.ground_truth,
            data_source=row.data_source,
            finish_reason=FinishReason.STOP,
            response_length=len(row.response.split()),
            extra=row.extra,
        )
        for number, row in enumerate(rows)
    ]


def _row(path: Path, number: int, line: str) -> _ItemRow:
    try:
        return _ROW.validate_json(line)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise UserError(f"--items {path}: line {number}: {place}: {problem['msg']}") from None
