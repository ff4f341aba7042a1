"""The maths grader: verdicts per CPU second and core, and how its verdicts compare with math-verify's alone.

`python -m benchmarks.reward_maths` prints the comparison by family of the pairs in tests/data/maths;
`python -m benchmarks.reward_maths expensive` how long honest responses take beside expensive ones.
"""

import asyncio
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import TimeoutError as DeadlineError
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from math_verify import parse, verify
from pebble import ProcessExpired, ProcessPool

from atoll.config.schema import GraderConfig, RewardSection
from atoll.reward.graders import GraderPanel
from atoll.reward.service import start_panel
from atoll.reward.verifiers.maths import grade_quickly, maths
from atoll.wire.types import FinishReason, Graded, GroupId, SampleId, ScoreItem

PAIRS = Path(__file__).parents[1] / "tests" / "data" / "maths" / "pairs.jsonl"
DEADLINE_S = 10
MEMORY_BYTES = 4 << 30
STEP = "Adding $x^2 + 3y$ to both sides of $\\frac{{a}}{{b}} = {n}$ we get {m} of them, so far. "


def run(num_integers: int = 20_000, num_fractions: int = 5_000, num_thoughts: int = 2_000) -> dict[str, Any]:
    """Verdicts per CPU second, on one core. All pairs are distinct, so no cache is hit; half are wrong."""
    rng = random.Random(0)
    maths(_item(r"\boxed{\sqrt{2}+x}", r"x+\sqrt{2}"))  # imports SymPy and warms the parser
    pairs = _pairs()
    asked = sum(grade_quickly(_item(pair["response"], pair["gold"])) is None for pair in pairs)
    return {
        "integers_per_s": _rate([_integer(rng, i) for i in range(num_integers)]),
        "fractions_per_s": _rate([_fraction(rng, i) for i in range(num_fractions)]),
        "thoughts_of_8_kb_per_s": _rate([_thought(rng, i) for i in range(num_thoughts)]),
        "expressions_per_s": _rate([_expression(i) for i in range(200)]),
        "share_of_pairs_for_math_verify": asked / len(pairs),
    }


def compare() -> dict[str, Counter[str]]:
    """By family: the pairs, and false positives, misses and errors of both graders."""
    table: dict[str, Counter[str]] = {}
    with ProcessPool(1, initializer=_bound_memory) as pool:
        for pair in _pairs():
            counts = table.setdefault(pair["family"], Counter())
            counts["right" if pair["right"] else "wrong"] += 1
            for name, grader in (("ours", _ours), ("alone", _math_verify)):
                try:
                    equal = pool.schedule(
                        grader, (pair["response"], pair["gold"]), timeout=DEADLINE_S
                    ).result()
                except (DeadlineError, ProcessExpired, MemoryError, OSError):
                    counts[f"{name} stopped"] += 1
                    equal = False
                if equal != pair["right"]:
                    counts[f"{name} {'missed' if pair['right'] else 'false'}"] += 1
    return table


def markdown(table: dict[str, Counter[str]]) -> str:
    total = sum(table.values(), Counter[str]())
    kinds = ("false", "missed", "stopped")
    columns = ("right", "wrong", *(f"{name} {kind}" for name in ("ours", "alone") for kind in kinds))
    lines = [f"| family | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for family, counts in [*sorted(table.items()), ("**all**", total)]:
        lines.append(f"| {family} | {' | '.join(str(counts[column]) for column in columns)} |")
    return "\n".join(lines)


def _pairs() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PAIRS.read_text().splitlines()]


def _item(response: str, truth: str) -> ScoreItem:
    sample = SampleId(GroupId("maths", 0, 0), 0)
    return ScoreItem(sample, "", response, truth, "", FinishReason.STOP, len(response))


def _rate(pairs: Sequence[tuple[ScoreItem, bool]]) -> float:
    begun = time.process_time()
    values = [maths(item).value for item, _ in pairs]
    seconds = time.process_time() - begun
    assert values == [float(right) for _, right in pairs]
    return len(pairs) / seconds


def _integer(rng: random.Random, i: int) -> tuple[ScoreItem, bool]:
    value, right = rng.randrange(10**6) * 20_000 + i, i % 2 == 0
    return _item(rf"So the answer is $\boxed{{{value}}}$.", f"{value if right else value + 1:,}"), right


def _fraction(rng: random.Random, i: int) -> tuple[ScoreItem, bool]:
    above, below, right = rng.randrange(1, 10**4) * 5_000 + i, rng.randrange(2, 100), i % 2 == 0
    factor = rng.randrange(2, 10)
    truth = rf"\frac{{{above}}}{{{below}}}"
    return _item(
        rf"Hence $x = \boxed{{\dfrac{{{above * factor + (not right)}}}{{{below * factor}}}}}$.", truth
    ), right


def _thought(rng: random.Random, i: int) -> tuple[ScoreItem, bool]:
    """8 KB of steps with formulas and braces before the box; integers and fractions in turns."""
    steps = "".join(STEP.format(n=rng.randrange(1000), m=rng.randrange(1000)) for _ in range(100))
    item, right = (_integer if i % 4 < 2 else _fraction)(rng, i)
    return _item(steps[: 8192 - len(item.response)] + item.response, item.ground_truth), right


def _expression(i: int) -> tuple[ScoreItem, bool]:
    """Those that exact rationals do not decide."""
    right = i % 2 == 0
    return _item(
        rf"\boxed{{{i + 2}\sqrt{{3}} + x^{{2}}}}", rf"x^2+\sqrt{{{3 * (i + 2 + (not right)) ** 2}}}"
    ), right


def _bound_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _ours(response: str, truth: str) -> bool:
    return maths(_item(response, truth)).value == 1.0


def _math_verify(response: str, truth: str) -> bool:
    """As its own README calls it, but for the timeouts: the pool ends it."""
    gold = parse(truth if "$" in truth or "boxed" in truth else f"${truth}$", parsing_timeout=None)
    return bool(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))


# the first is refused beforehand, the second takes SymPy more than the budget
EXPENSIVE = {"towers": r"\boxed{e^{e^{e^{e^{e^{x}}}}}}", "over budget": r"\boxed{e^{e^{e^{20x}}}}"}


async def beside_expensive(num_honest: int = 100, num_expensive: int = 3) -> dict[str, float]:
    """Seconds for honest responses, all of which need math-verify: alone, and behind expensive ones."""
    config = GraderConfig(name="maths")
    async with AsyncExitStack() as resources:
        panel, _ = await start_panel(RewardSection(graders=(config,)), resources)
        resources.push_async_callback(panel.retire)
        await _seconds(panel, [_expression(0)[0]], 1)  # starts a worker
        seconds = {"alone": await _seconds(panel, _honest(0, num_honest), num_honest)}
        for number, (kind, response) in enumerate(EXPENSIVE.items(), start=1):
            first = [_item(response, f"x^{n + 2}")._replace(id=_id(1000 + n)) for n in range(num_expensive)]
            seconds[kind] = await _seconds(panel, [*first, *_honest(number, num_honest)], num_honest)
    return seconds


async def _seconds(panel: GraderPanel, items: Sequence[ScoreItem], num_honest: int) -> float:
    """Until the last `num_honest` items have their verdicts."""
    left, begun, ended = {item.id for item in items[-num_honest:]}, time.perf_counter(), 0.0
    async for verdicts in panel.verdicts(items):
        assert all(isinstance(verdict, Graded) for verdict in verdicts), verdicts
        left -= {verdict.id for verdict in verdicts}
        if not left and not ended:
            ended = time.perf_counter()
    return ended - begun


def _honest(number: int, count: int) -> list[ScoreItem]:
    """Others for each number, so that no cache is hit."""
    return [_expression(1 + number * count + i)[0]._replace(id=_id(i)) for i in range(count)]


def _id(index: int) -> SampleId:
    return SampleId(GroupId("maths", 0, 0), index)


if __name__ == "__main__":
    if sys.argv[1:] == ["expensive"]:
        took = asyncio.run(beside_expensive())
        for name, seconds in took.items():
            print(f"{name}: {seconds:.2f} s, {seconds / took['alone']:.2f} times as long as alone")
    else:
        print(markdown(compare()))
