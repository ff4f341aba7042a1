"""Runs a service's graders (inline, isolated or sandboxed) and combines their verdicts."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Self

from atoll.config.functions import load
from atoll.config.schema import GraderConfig
from atoll.reward.isolated_grader import IsolatedGrader
from atoll.reward.sandbox.base import Sandbox
from atoll.reward.sandbox.program_slots import ProgramSlots
from atoll.reward.score import (
    GRADERS,
    ISOLATED,
    PRELOADED,
    ROUTED,
    SANDBOXED,
    Failure,
    Grader,
    Outcome,
    check_grade,
    combine,
    failure,
    judge,
)
from atoll.reward.sources import Route
from atoll.runtime.errors import UserError
from atoll.wire.types import ScoreItem, Verdict

INLINE_BATCH = 64  # verdicts between yields to the event loop: at most a millisecond
KEEPALIVE_S = 10.0  # without a verdict, until an empty message tells the caller that grading continues
LINGER_S = 0.005  # how long a verdict waits for others to share its message


def needs_sandbox(config: GraderConfig) -> bool:
    return config.name in SANDBOXED | ROUTED


def needs_workers(config: GraderConfig) -> bool:
    return config.is_users_own or config.name in ISOLATED | ROUTED


def is_inline(config: GraderConfig) -> bool:
    return not (needs_sandbox(config) or needs_workers(config))


def modules_to_preload(configs: Sequence[GraderConfig]) -> list[str]:
    """Modules to import before forking workers of these graders."""
    routed = any(config.name in ROUTED for config in configs)
    names = {config.name for config in configs}
    return [module for name, module in PRELOADED.items() if name in names or routed]


class RunningGrader(Protocol):
    """A grader that runs asynchronously."""

    async def grade(self, item: ScoreItem) -> Outcome:
        """Cancelling frees its resources."""
        ...

    async def close(self) -> None:
        """Call once nothing is being graded."""
        ...


def with_file(config: GraderConfig, item: ScoreItem) -> ScoreItem:
    """The item with `config.file` of the session's workspace as its response. A missing file is an empty one:
    a wrong answer, and no error, by which a policy could get rid of its sample."""
    return item._replace(response=item.environment.get(config.file, "")) if config.file else item


def with_reason(config: GraderConfig, item: ScoreItem, outcome: Outcome) -> Outcome:
    """The outcome of an item with its file; says so if there was none."""
    if isinstance(outcome, Failure) or not config.file or config.file in item.environment:
        return outcome
    return replace(outcome, reason=f"no file: {config.file}")


class InlineGrader:
    """An inline grader behind the asynchronous interface, for routed items."""

    def __init__(self, config: GraderConfig) -> None:
        self._grade: Grader = load(config, GRADERS)

    async def grade(self, item: ScoreItem) -> Outcome:
        return judge(self._grade, item)

    async def close(self) -> None:
        pass  # nothing to free


class SandboxedGrader:
    """Runs in the service, with programs in its sandbox. A response whose programs all sleep makes room for
    the next one, as programs do in the sandbox; one that computes keeps its place, since others beside it
    would take the time that its deadlines assume."""

    def __init__(self, config: GraderConfig, sandbox: Sandbox, programs: int) -> None:
        self._grade: Callable[..., Any] = load(config, GRADERS)
        self._sandbox = sandbox
        self._deadline_s, self._is_file = config.deadline_s, bool(config.file)
        self._places = ProgramSlots(config.concurrency or programs)

    async def grade(self, item: ScoreItem) -> Outcome:
        async with self._places.acquire() as step_aside:
            sandbox = self._sandbox.watched(step_aside)
            try:
                async with asyncio.timeout(self._deadline_s):
                    return check_grade(await self._grade(item, sandbox, self._is_file))
            except TimeoutError:  # programs have their own limits: the machine is slow
                cause = f"no grade within {self._deadline_s:g} s (deadline_s)"
                return Failure(cause, retryable=True, timed_out=True)
            except Exception as error:
                return failure(error)

    async def close(self) -> None:
        pass  # the sandbox is the service's


class RoutedGrader:
    """Grades each item with the grader of its route, started on first use."""

    def __init__(self, config: GraderConfig, run: Callable[[GraderConfig], RunningGrader]) -> None:
        self._route: Callable[[ScoreItem], Route] = load(config, GRADERS)
        self._settings = config.model_dump(include={"deadline_s", "concurrency", "file"})
        self._run = run
        self._running: dict[str, RunningGrader] = {}

    async def grade(self, item: ScoreItem) -> Outcome:
        try:
            grader = self._grader(self._route(item))
        except ValueError as error:  # no grader for it, or one that rejects the route's parameters
            return failure(error)
        return await grader.grade(item)

    async def close(self) -> None:
        for grader in self._running.values():
            await grader.close()

    def _grader(self, route: Route) -> RunningGrader:
        key = repr(route)
        if key not in self._running:
            settings = {"name": route.grader, **self._settings, **route.parameters}
            self._running[key] = self._run(GraderConfig.model_validate(settings))
        return self._running[key]


def start_grader(config: GraderConfig, sandbox: Sandbox | None, programs: int) -> RunningGrader:
    """Raises UserError if a user's file cannot be read."""
    if config.name in ROUTED:
        return RoutedGrader(config, partial(start_grader, sandbox=sandbox, programs=programs))
    if config.name in SANDBOXED:
        assert sandbox is not None  # the service starts one in this case
        return SandboxedGrader(config, sandbox, programs)
    return IsolatedGrader(config) if needs_workers(config) else InlineGrader(config)


class GraderPanel:
    """All graders of a service, run concurrently."""

    def __init__(
        self,
        configs: Iterable[GraderConfig],
        inline: Mapping[str, Grader],
        others: Mapping[str, RunningGrader],
    ) -> None:
        self._configs = {config.name: config for config in configs}
        self._weights = {config.name: config.weight for config in configs}
        self._inline = inline
        self._others = others
        self._calls = 0
        self._idle = asyncio.Event()

    @classmethod
    async def start(cls, configs: Sequence[GraderConfig], sandbox: Sandbox | None, programs: int) -> Self:
        """`programs`: the sandbox's concurrency. Raises UserError if a user-defined grader cannot be loaded,
        or if a setting has no effect."""
        for config in filter(is_inline, configs):
            if config.concurrency or config.deadline_s != GraderConfig.model_fields["deadline_s"].default:
                raise UserError(
                    f"reward.graders: {config.name} takes no time and runs in the service itself: deadline_s "
                    "and concurrency have no effect on it, remove them"
                )
        inline = {config.name: load(config, GRADERS) for config in configs if is_inline(config)}
        slow = [config for config in configs if not is_inline(config)]
        others = {config.name: start_grader(config, sandbox, programs) for config in slow}
        panel = cls(configs, inline, others)
        await panel._load(others)
        return panel

    @property
    def names(self) -> list[str]:
        return list(self._configs)

    async def reload(self) -> "GraderPanel":
        """Returns a new panel with the user-defined graders imported again. Raises UserError if one cannot be
        loaded, or if there are none.
        """
        own = [config for config in self._configs.values() if config.is_users_own]
        fresh = {config.name: IsolatedGrader(config) for config in own}
        if not fresh:
            raise UserError("reward.graders names no file.py:function: there is nothing to reload")
        panel = GraderPanel(self._configs.values(), self._inline, {**self._others, **fresh})
        await panel._load(fresh)
        return panel

    async def verdicts(self, items: Sequence[ScoreItem]) -> AsyncGenerator[list[Verdict], None]:
        """Yields lists of ready verdicts, one verdict per item; an empty list after each KEEPALIVE_S without
        any. Leaving early cancels the rest.
        """
        self._calls += 1
        self._idle.clear()
        try:
            grade = self._as_they_come if self._others else self._one_by_one
            async with aclosing(grade(items)) as batches:
                async for verdicts in batches:
                    yield verdicts
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def retire(self, successor: "GraderPanel | None" = None) -> None:
        """Closes graders that `successor` has not taken over, once running calls have ended."""
        if self._calls:
            await self._idle.wait()
        for name, grader in self._others.items():
            if successor is None or successor._others[name] is not grader:
                await grader.close()

    async def _load(self, graders: Mapping[str, RunningGrader]) -> None:
        try:
            for config in self._configs.values():
                grader = graders.get(config.name)
                if config.is_users_own and isinstance(grader, IsolatedGrader):
                    await grader.load()
        except BaseException:
            for grader in graders.values():
                await grader.close()
            raise

    async def _one_by_one(self, items: Sequence[ScoreItem]) -> AsyncGenerator[list[Verdict], None]:
        for start in range(0, len(items), INLINE_BATCH):
            yield [
                combine(item.id, self._weights, self._judge_inline(item))
                for item in items[start : start + INLINE_BATCH]
            ]

    async def _as_they_come(self, items: Sequence[ScoreItem]) -> AsyncGenerator[list[Verdict], None]:
        """Waits for one task per item; all end, since every grader has a deadline."""
        ready: list[asyncio.Task[Verdict]] = []
        changed = asyncio.Event()

        def note(task: asyncio.Task[Verdict]) -> None:
            ready.append(task)
            changed.set()

        tasks = [asyncio.create_task(self._verdict(item)) for item in items]
        try:
            for task in tasks:
                task.add_done_callback(note)
            left = len(tasks)
            while left:
                with suppress(TimeoutError):
                    async with asyncio.timeout(KEEPALIVE_S):
                        await changed.wait()
                if 0 < len(ready) < left:
                    await asyncio.sleep(LINGER_S)
                changed.clear()
                verdicts = [task.result() for task in ready]
                left -= len(verdicts)
                ready.clear()
                yield verdicts
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _verdict(self, item: ScoreItem) -> Verdict:
        outcomes = self._judge_inline(item)
        others = await asyncio.gather(
            *[grader.grade(with_file(self._configs[name], item)) for name, grader in self._others.items()]
        )
        for name, outcome in zip(self._others, others, strict=True):
            outcomes[name] = with_reason(self._configs[name], item, outcome)
        return combine(item.id, self._weights, outcomes)

    def _judge_inline(self, item: ScoreItem) -> dict[str, Outcome]:
        return {
            name: with_reason(config, item, judge(grade, with_file(config, item)))
            for name, grade in self._inline.items()
            if (config := self._configs[name])
        }
