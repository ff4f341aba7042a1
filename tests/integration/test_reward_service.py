"""A reward service over real gRPC, with graders that hang, crash and misbehave."""

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest

from atoll.cli.main import main
from atoll.config.schema import GraderConfig, RewardSection, SandboxConfig
from atoll.coordinator.control import RunControl
from atoll.coordinator.fleet.registry import Registry
from atoll.coordinator.rewards.rewards import Rewards
from atoll.reward import graders, isolated_grader
from atoll.reward.graders import GraderPanel
from atoll.reward.sandbox.base import Dialogue
from atoll.reward.service import RewardService
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.reward import RewardClient
from atoll.runtime.errors import OverloadedError, ServiceUnavailableError, UserError
from atoll.runtime.server import Server
from atoll.runtime.store import Store
from atoll.wire.codec.rewards import decode_verdict, encode_score_item, encode_verdict
from atoll.wire.types import (
    Execution,
    FinishReason,
    Grade,
    Graded,
    GradingError,
    GroupId,
    ProgramLimits,
    ProgramStatus,
    SampleId,
    ScoreItem,
    ServiceEntry,
)
from atoll.wire.v1 import reward_pb2, reward_pb2_grpc
from tests.coordinator_server import serve_coordinator
from tests.fake_rewards import scored
from tests.reward_process import start_reward_process
from tests.tokens import TOKEN

GRADER = """
import os, re, signal

def grade(item):
    if "began" in item.extra:
        open(item.extra["began"], "w").close()  # waits until the test reads it
    if "go" in item.extra:
        open(item.extra["go"], "w").close()
    if item.response == "hang":
        re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter lock for ages
    if item.response == "abort":
        os.abort()
    if item.response == "exit":
        os._exit(0)
    if item.response == "quit":
        raise SystemExit("enough")
    if item.response == "raise":
        raise LookupError("no such column")
    if item.response == "away":
        raise ConnectionResetError("judge:8000")
    return float(item.extra["length"]) / 10
"""


def item(index: int, response: str, **extra: object) -> ScoreItem:
    return ScoreItem(
        id=SampleId(GroupId("toy", 0, 7), index),
        prompt="12+34=",
        response=response,
        ground_truth="46",
        data_source="arithmetic",
        finish_reason=FinishReason.LENGTH,
        response_length=3,
        extra={"length": str(index)} | {key: str(value) for key, value in extra.items()},
    )


@asynccontextmanager
async def serving(service: RewardService) -> AsyncIterator[RewardClient]:
    server = await Server.start(
        "atoll.v1.Reward", service.add_to, host="127.0.0.1", port=0, token=TOKEN, setting="--port"
    )
    client = RewardClient(server.address, Caller(token=TOKEN), timeout_s=60.0)
    try:
        yield client
    finally:
        await client.close()
        await server.stop(0)
        await service.close()


@asynccontextmanager
async def grading(*graders: GraderConfig, max_queued: int = 8192) -> AsyncIterator[RewardClient]:
    service = await RewardService.start(RewardSection(graders=graders, max_queued=max_queued))
    async with serving(service) as client:
        yield client


async def replies(client: RewardClient, items: Sequence[ScoreItem]) -> AsyncIterator[reward_pb2.ScoreReply]:
    """The messages of one call, as they arrive."""
    async with grpc.aio.insecure_channel(client.address) as channel:
        request = reward_pb2.ScoreRequest(items=[encode_score_item(item) for item in items])
        metadata = Caller(token=TOKEN).metadata
        async for reply in reward_pb2_grpc.RewardStub(channel).Score(request, timeout=60, metadata=metadata):
            yield reply


@pytest.fixture
def grader(tmp_path: Path) -> GraderConfig:
    (tmp_path / "mine.py").write_text(GRADER)
    return GraderConfig(name=f"{tmp_path / 'mine.py'}:grade", weight=2.0)


@pytest.fixture
def began(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "began")
    return tmp_path / "began"


@pytest.fixture
def go(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "go")
    return tmp_path / "go"


async def opened(fifo: Path) -> None:
    """Waits for the grader to open it, which waits for this."""
    await asyncio.wait_for(asyncio.to_thread(fifo.read_bytes), 30)


def workers() -> list[psutil.Process]:
    """The children of the fork server, which stays, as does the resource tracker."""
    return [worker for child in psutil.Process().children() for worker in child.children()]


async def all_gone(processes: Sequence[psutil.Process]) -> bool:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=10)
    return not alive


async def test_cheap_graders_run_in_the_service_and_answer_in_batches() -> None:
    before = set(psutil.Process().children(recursive=True))
    async with grading(GraderConfig(name="exact_match"), GraderConfig(name="server:judge")) as client:
        described = await client.describe()
        assert described.graders == ("exact_match",)  # the coordinator asks servers itself
        assert described.max_queued == 8192
        items = [item(index, "46" if index % 3 else "45") for index in range(200)]
        messages = [reply async for reply in replies(client, items)]
        assert [len(message.verdicts) for message in messages] == [64, 64, 64, 8]
        assert await client.score(items) == [
            Graded(item.id, float(item.response == "46"), {"exact_match": float(item.response == "46")})
            for item in items
        ]
        assert await client.score([]) == []
        by_group = [one async for some in client.verdicts(items) for one in some]  # what they share, once
        assert by_group == await client.score(items)
        assert set(psutil.Process().children(recursive=True)) <= before
        with pytest.raises(UserError, match=r"names no file\.py:function: there is nothing to reload"):
            await client.reload()
        with pytest.raises(UserError, match=r"no sandbox: add \[reward.sandbox\]"):
            await client.execute("print(1)", b"", ProgramLimits())


async def test_a_grader_that_hangs_crashes_or_raises_costs_one_verdict(grader: GraderConfig) -> None:
    hasty = grader.model_copy(update={"deadline_s": 5.0, "concurrency": 2})
    bad = {
        "hang": ("no grade within 5 s (deadline_s)", False),
        "abort": ("its process died (signal SIGABRT); see the log", True),
        "exit": ("its process died (exit code 0); see the log", True),
        "quit": ("SystemExit: enough (mine.py:16)", False),
        "raise": ("LookupError: no such column (mine.py:18)", False),
        "away": ("ConnectionResetError: judge:8000 (mine.py:20)", True),
    }
    items = [item(index, response) for index, response in enumerate([*bad, "45", "46"])]
    async with grading(GraderConfig(name="exact_match"), hasty) as client:
        arrived = [verdict async for reply in replies(client, items) for verdict in reply.verdicts]
        assert arrived[-1].id == str(items[0].id)  # none waits for it
        ids = {str(item.id): item.id for item in items}
        verdicts = {ids[verdict.id]: decode_verdict(verdict, ids[verdict.id]) for verdict in arrived}
        for scored, (cause, retryable) in zip(items[:6], bad.values(), strict=True):
            timed_out = scored.response == "hang"
            assert verdicts[scored.id] == GradingError(scored.id, grader.name, cause, retryable, timed_out)
        assert verdicts[items[6].id] == Graded(items[6].id, 0.6 * 2, {"exact_match": 0.0, grader.name: 0.6})
        assert verdicts[items[7].id] == Graded(
            items[7].id, 1.0 + 0.7 * 2, {"exact_match": 1.0, grader.name: 0.7}
        )
        await asyncio.wait_for(client.describe(), 5)
        assert len(workers()) <= 2
    assert await all_gone(workers())


async def test_maths_that_takes_no_time_takes_no_worker() -> None:
    answers = [r"\boxed{\frac{92}{2}}", r"so it is \boxed{47}"]
    async with grading(GraderConfig.model_validate({"name": "maths", "wrong": -1.0})) as client:
        verdicts = await client.score([item(index, answer) for index, answer in enumerate(answers)])
        assert [verdict.value for verdict in verdicts if isinstance(verdict, Graded)] == [1.0, -1.0]
        assert workers() == []


async def test_a_response_that_is_too_expensive_to_grade_is_wrong_and_no_error(
    grader: GraderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `maths` has it: the kernel ends the comparison, also in the middle of an operation in C."""
    monkeypatch.setattr(isolated_grader, "BUDGET_S", 0.2)
    monkeypatch.setattr(isolated_grader, "BUDGETED", {grader.name: lambda item: Grade(-1.0, "unreadable")})
    async with grading(grader) as client:
        (verdict,) = await client.score([item(1, "hang")])
        assert verdict == Graded(item(1, "").id, -2.0, {grader.name: -1.0}, {grader.name: "unreadable"})
        (verdict,) = await client.score([item(1, "abort")])  # a crash remains an error
        assert isinstance(verdict, GradingError)
    assert await all_gone(workers())


async def test_expensive_responses_do_not_hold_up_those_behind_them(
    grader: GraderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their budget never ends here: if they kept the only place, the others would have no verdict."""
    monkeypatch.setattr(isolated_grader, "BUDGET_S", 1e6)
    monkeypatch.setattr(isolated_grader, "STEP_ASIDE_S", 0.01)
    monkeypatch.setattr(isolated_grader, "MAX_ASIDE", 100)
    monkeypatch.setattr(isolated_grader, "BUDGETED", {grader.name: lambda item: Grade(-1.0, "unreadable")})
    patient = grader.model_copy(update={"deadline_s": 1e6})
    async with grading(patient) as client:
        items = [item(index, "hang" if index < 3 else "46") for index in range(13)]
        arrived: list[str] = []
        async with aclosing(replies(client, items)) as messages:
            while len(arrived) < 10:
                arrived += [verdict.id for verdict in (await anext(messages)).verdicts]
        assert set(arrived) == {str(honest.id) for honest in items[3:]}
    assert await all_gone(workers())


async def test_a_malformed_item_is_refused_by_its_number(grader: GraderConfig) -> None:
    good = encode_score_item(item(0, "46"))
    bad_id = encode_score_item(item(0, "46"))
    bad_id.id = "7"
    bad_reason = encode_score_item(item(0, "46"))
    bad_reason.finish_reason = "eos"
    problems = {
        "item 1 .*id: got '7', expected RUN/EPOCH/PROMPT/INDEX": bad_id,
        "item 1 .*finish_reason: got 'eos', expected one of stop, length, abort": bad_reason,
    }
    async with (
        grading(GraderConfig(name="exact_match")) as client,
        grpc.aio.insecure_channel(client.address) as channel,
    ):
        score = reward_pb2_grpc.RewardStub(channel).Score
        for problem, bad in problems.items():
            request = reward_pb2.ScoreRequest(items=[good, bad])
            with pytest.raises(grpc.aio.AioRpcError, match=problem) as caught:
                await score(request, timeout=60, metadata=Caller(token=TOKEN).metadata).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(await client.score([item(1, "46")])) == 1  # their places are free again


async def test_a_worker_that_is_killed_while_idle_costs_nothing(grader: GraderConfig) -> None:
    async with grading(grader) as client:
        assert await client.score([item(1, "46")]) == [Graded(item(1, "").id, 0.2, {grader.name: 0.1})]
        (worker,) = workers()
        worker.kill()
        assert await all_gone([worker])
        assert await client.score([item(1, "46")]) == [Graded(item(1, "").id, 0.2, {grader.name: 0.1})]


async def test_graders_that_cannot_be_loaded_stop_the_start(tmp_path: Path) -> None:
    sources = {
        "import absent_module\ndef f(item): return 1.0": r"mine\.py cannot be imported: ModuleNotFoundError",
        "import os\nos._exit(3)\ndef f(item): return 1.0": r"died while loading .*mine\.py:f \(exit code 3\)",
        "def f(item, other): return 1.0": "one positional parameter",
    }
    for source, cause in sources.items():
        (tmp_path / "mine.py").write_text("def f(item): return 1.0")
        section = RewardSection(graders=(GraderConfig(name=f"{tmp_path / 'mine.py'}:f"),))
        (tmp_path / "mine.py").write_text(source)
        with pytest.raises(ValueError, match=cause):
            await RewardService.start(section)
    (tmp_path / "mine.py").unlink()
    with pytest.raises(ValueError, match=r"mine\.py: no such file"):
        await RewardService.start(section)
    assert await all_gone(workers())


async def test_workers_are_forked_from_a_process_without_torch(tmp_path: Path) -> None:
    """If it had initialized CUDA, a grader could not use a GPU."""
    (tmp_path / "mine.py").write_text("import sys\ndef f(item): return float('torch' in sys.modules)")
    async with grading(GraderConfig(name=f"{tmp_path / 'mine.py'}:f")) as client:
        [verdict] = await client.score([item(0, "")])
    assert isinstance(verdict, Graded)
    assert verdict.value == 0.0


async def test_graders_are_loaded_anew_on_request_and_only_then(
    grader: GraderConfig, tmp_path: Path, began: Path, go: Path
) -> None:
    file = tmp_path / "mine.py"
    one, ten = {grader.name: 0.1}, {grader.name: 10.0}
    async with grading(GraderConfig(name="exact_match", weight=0.0), grader) as client:

        async def component(response: str = "46") -> dict[str, float]:
            (verdict,) = await client.score([item(1, response)])
            assert isinstance(verdict, Graded)
            return {grader.name: verdict.components[grader.name]}

        old = asyncio.create_task(client.score([item(1, "46", began=began, go=go)]))
        await opened(began)
        file.write_text("def grade(item): return 10.0")
        await client.reload()
        assert await component() == ten
        await opened(go)
        (verdict,) = await old  # begun before: with the old graders
        assert verdict == Graded(item(1, "").id, 0.2, one | {"exact_match": 1.0})
        file.write_text("import absent_module")
        with pytest.raises(UserError, match="absent_module"):
            await client.reload()
        assert await component() == ten
        for worker in workers():  # and it remains so when a worker has to be replaced
            with suppress(psutil.NoSuchProcess):  # one without a grader is ending
                worker.kill()
        assert await all_gone(workers())
        assert await component() == ten
        file.unlink()
        with pytest.raises(UserError, match="no such file"):
            await client.reload()
        assert await component() == ten
        assert len(workers()) == 1  # the old one's is gone
    assert await all_gone(workers())


async def test_atoll_reload(
    grader: GraderConfig, tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = Registry(store, lease_s=60)
    async with grading(grader) as client:
        await registry.register(ServiceEntry("reward", "reward-0", "1", client.address))
        await anext(registry.changes())
        coordinator = await serve_coordinator(RunControl(trains=False), registry)
        command = ["reload", "--coordinator", coordinator.address]
        (tmp_path / "mine.py").write_text("def grade(item): return 10.0")
        assert await asyncio.to_thread(main, command) == 0
        assert capsys.readouterr().out == "reward-0 now uses the current files of reward.graders\n"
        assert await client.score([item(1, "46")]) == [Graded(item(1, "").id, 20.0, {grader.name: 10.0})]
        (tmp_path / "mine.py").write_text("def grade(item) return 10.0")
        assert await asyncio.to_thread(main, command) == 2
        error = capsys.readouterr().err
        assert error.startswith("atoll reload: reward-0 keeps its current graders: ")
        assert "SyntaxError" in error
        await coordinator.stop(0)


async def test_a_full_queue_refuses_at_once_and_each_verdict_frees_a_place(
    grader: GraderConfig, began: Path, go: Path
) -> None:
    async with grading(grader.model_copy(update={"concurrency": 2}), max_queued=3) as client:
        with pytest.raises(UserError, match=r"4 responses in one call; this service accepts at most 3"):
            await client.score([item(index, "46") for index in range(4)])
        held = asyncio.create_task(client.score([item(1, "46"), item(2, "46", began=began, go=go)]))
        await opened(began)
        # item 1 need not wait, so its place is free once its verdict is sent
        assert len(await client.score([item(3, "46")])) == 1
        with pytest.raises(OverloadedError, match=r"3 more would exceed reward.max_queued = 3"):
            await client.score([item(index, "46") for index in range(3)])
        await opened(go)
        assert len(await held) == 2
        assert len(await client.score([item(index, "46") for index in range(3)])) == 3


async def test_a_service_that_holds_little_grades_whatever_a_run_has() -> None:
    items = [item(index, "46" if index % 3 else "45") for index in range(500)]
    async with grading(GraderConfig(name="exact_match"), max_queued=7) as client:
        rewards = Rewards(retries=0)
        rewards.add(client, (await client.describe()).max_queued)
        verdicts = await scored(rewards, items)
    assert [verdict.value for verdict in verdicts if isinstance(verdict, Graded)] == [
        float(item.response == "46") for item in items
    ]


async def test_a_call_lasts_as_long_as_the_service_says_that_it_is_at_work(
    grader: GraderConfig, began: Path, go: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graders, "KEEPALIVE_S", 0.2)
    async with grading(grader) as client:
        messages = replies(client, [item(1, "46", began=began, go=go)])
        first = asyncio.ensure_future(anext(messages))
        await opened(began)
        assert [len((await message).verdicts) for message in (first, anext(messages))] == [0, 0]
        await opened(go)
        assert [len(message.verdicts) async for message in messages if message.verdicts] == [1]


async def test_a_service_that_is_silent_for_too_long_loses_the_call() -> None:
    ended = asyncio.Event()

    class Silent(reward_pb2_grpc.RewardServicer):
        async def Score(  # noqa: N802
            self, request: reward_pb2.ScoreRequest, context: Any
        ) -> AsyncIterator[reward_pb2.ScoreReply]:
            try:
                yield reward_pb2.ScoreReply(verdicts=[encode_verdict(Graded(item(1, "").id, 1.0, {}))])
                await asyncio.Event().wait()
            finally:
                ended.set()

    server = await Server.start(
        "atoll.v1.Reward",
        lambda grpc_server: reward_pb2_grpc.add_RewardServicer_to_server(Silent(), grpc_server),
        host="127.0.0.1",
        port=0,
        token=TOKEN,
        setting="--port",
    )
    client = RewardClient(server.address, Caller(token=TOKEN), timeout_s=0.5)
    verdicts = client.verdicts([item(1, "46"), item(2, "46")])
    assert await anext(verdicts) == [Graded(item(1, "").id, 1.0, {})]
    with pytest.raises(ServiceUnavailableError, match=r"Score at .*: nothing came for 0\.5 s"):
        await anext(verdicts)
    await asyncio.wait_for(ended.wait(), 10)
    await client.close()
    await server.stop(0)


async def test_a_cancelled_call_frees_its_places_and_its_worker(grader: GraderConfig, began: Path) -> None:
    async with grading(grader, max_queued=2) as client:
        call = asyncio.create_task(client.score([item(1, "hang", began=began), item(2, "46")]))
        await opened(began)
        (worker,) = workers()
        call.cancel()
        assert await all_gone([worker])
        assert len(await client.score([item(1, "46"), item(2, "46")])) == 2


async def test_a_grader_that_hangs_does_not_hold_up_the_end(grader: GraderConfig, began: Path) -> None:
    async with grading(grader) as client:
        hanging = asyncio.create_task(client.score([item(1, "hang", began=began)]))
        await opened(began)
        begun = time.monotonic()
    assert time.monotonic() - begun < 20
    assert await all_gone(workers())
    with pytest.raises(ServiceUnavailableError):
        await hanging


@pytest.mark.long
async def test_every_way_to_run_a_grader_in_one_request(grader: GraderConfig, began: Path) -> None:
    """A mix of inline, isolated, sandboxed and routed graders, with a real sandbox that Execute also uses."""
    tests = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
    program = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    wrong = program.replace("a + b", "3")
    fractions = GraderConfig.model_validate({"name": "data_source"})
    pattern = GraderConfig.model_validate({"name": "regex", "pattern": "print"})
    names = ["exact_match", "regex", "code", "data_source", grader.name]
    graders = [GraderConfig(name="exact_match"), pattern, GraderConfig(name="code"), fractions, grader]

    def coding(index: int, response: str, **extra: object) -> ScoreItem:
        return item(index, response, **extra)._replace(ground_truth=tests, data_source="taco")

    items = [coding(1, program), coding(2, wrong), coding(3, program)._replace(data_source="unknown")]
    async with grading(*graders) as client:
        assert (await client.describe()).graders == tuple(names)
        verdicts = {verdict.id: verdict for verdict in await client.score(items)}
        right, half = verdicts[items[0].id], verdicts[items[1].id]
        assert isinstance(right, Graded)
        assert isinstance(half, Graded)
        assert right.components == dict(zip(names, [0.0, 1.0, 1.0, 1.0, 0.1], strict=True))
        assert right.value == pytest.approx(0.0 + 1.0 + 1.0 + 1.0 + 2.0 * 0.1)
        assert half.components == dict(zip(names, [0.0, 1.0, 0.0, 0.5, 0.2], strict=True))
        assert half.reasons["code"].startswith("wrong answer: case 2")
        unknown = verdicts[items[2].id]
        assert isinstance(unknown, GradingError)
        assert (unknown.grader, unknown.retryable) == ("data_source", False)
        assert "data_source 'unknown' has no grader" in unknown.cause

        execution = await client.execute("import sys; print(sys.stdin.read()[::-1])", b"abc", ProgramLimits())
        assert (execution.status, execution.stdout) == (ProgramStatus.OK, b"cba\n")
        before = set(psutil.Process().children(recursive=True))
        call = asyncio.create_task(client.execute("while True: pass", b"", ProgramLimits(timeout_s=50.0)))
        async with asyncio.timeout(20):
            while not (endless := set(psutil.Process().children(recursive=True)) - before):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # there is no event for another process's start
        call.cancel()
        assert await all_gone(list(endless))


class RecordingSandbox:
    """Records its calls."""

    tier = "none, it records"

    def __init__(self) -> None:
        self.limits: list[ProgramLimits] = []
        self.num_tools = 0  # programs of tools at once
        self.go = asyncio.Event()  # until then a program that is "wait" runs
        self.begun = asyncio.Semaphore(0)

    def apart(self, programs: int) -> "RecordingSandbox":
        self.num_tools = programs
        return self

    async def run(self, source: str, stdin: bytes, limits: ProgramLimits) -> Execution:
        self.limits.append(limits)
        if source == "wait":
            self.begun.release()
            await self.go.wait()
        return Execution(ProgramStatus.OK, "", source.encode() + stdin, b"", 0.1, 0.2)

    def open(
        self, source: str, limits: ProgramLimits, *, beside: Dialogue | None = None
    ) -> AbstractAsyncContextManager[Dialogue]:
        raise NotImplementedError

    async def close(self) -> None:
        pass


async def test_execute_stays_within_the_services_limits() -> None:
    sandbox = RecordingSandbox()
    section = RewardSection(graders=(), sandbox=SandboxConfig(memory_mb=100, output_kb=10, disk_mb=1))
    service = RewardService(section, await GraderPanel.start((), sandbox, 1), sandbox, AsyncExitStack())
    async with serving(service) as client:
        small = ProgramLimits(timeout_s=2.0, memory_bytes=50 << 20, output_bytes=1000)
        assert await client.execute("print(1)", b"in", small) == Execution(
            ProgramStatus.OK, "", b"print(1)in", b"", 0.1, 0.2
        )
        await client.execute(
            "", b"", ProgramLimits(timeout_s=1e6, memory_bytes=1 << 40, output_bytes=1 << 40)
        )
        with pytest.raises(UserError, match="expected limits above 0"):
            await client.execute("", b"", replace(small, timeout_s=-1.0))
        with pytest.raises(UserError, match="expected limits above 0 and a finite timeout_s"):
            await client.execute("", b"", replace(small, timeout_s=math.inf))
        asked, bounded = sandbox.limits
        assert (asked.timeout_s, asked.memory_bytes, asked.output_bytes) == (2.0, 50 << 20, 1000)
        assert 50 < bounded.timeout_s < 61  # the call's own deadline
        assert (bounded.memory_bytes, bounded.output_bytes) == (100 << 20, 10 << 10)
        assert (asked.disk_bytes, bounded.disk_bytes) == (1 << 20, 1 << 20)
        await client.execute("", b"", replace(small, disk_bytes=100))
        assert sandbox.limits[-1].disk_bytes == 100
        assert (await client.describe()).disk_bytes == 0  # its tier has no namespaces
    assert sandbox.num_tools == 16


async def test_more_programs_of_tools_than_a_service_holds_are_refused_and_keep_no_response_out() -> None:
    sandbox = RecordingSandbox()
    section = RewardSection(sandbox=SandboxConfig(executions=5), max_queued=2)
    panel = await GraderPanel.start(section.graders, sandbox, 1)
    async with serving(RewardService(section, panel, sandbox, AsyncExitStack())) as client:
        calls = [asyncio.create_task(client.execute("wait", b"", ProgramLimits())) for _ in range(2)]
        for _ in calls:
            await asyncio.wait_for(sandbox.begun.acquire(), 30)
        with pytest.raises(
            OverloadedError, match=r"2 programs of tools run or wait, as many as reward\.max_q"
        ):
            await client.execute("", b"", ProgramLimits())
        assert len(await client.score([item(1, "46"), item(2, "46")])) == 2
        sandbox.go.set()
        assert [execution.stdout for execution in await asyncio.gather(*calls)] == [b"wait"] * 2
        assert (await client.execute("1", b"", ProgramLimits())).stdout == b"1"
    assert sandbox.num_tools == 5


async def test_neither_tools_nor_graders_wait_for_the_other() -> None:
    """As many programs sleep as fit: one place, and seven that stepped aside."""
    sleep = "import time; print(flush=True); time.sleep(600)"
    coding = item(0, "")._replace(ground_truth=json.dumps({"inputs": ["1"], "outputs": ["1"]}))
    sleeping = {"timeout_s": 500.0, "case_timeout_s": 100.0, "deadline_s": 600.0}
    code = GraderConfig.model_validate({"name": "code", **sleeping})
    section = RewardSection(graders=(code,), sandbox=SandboxConfig(programs=1, executions=1))
    before = set(psutil.Process().children(recursive=True))

    async def programs(count: int) -> None:
        async with asyncio.timeout(60):
            while len(set(psutil.Process().children(recursive=True)) - before) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # there is no event for another process's start

    async with serving(await RewardService.start(section)) as client:
        before = set(psutil.Process().children(recursive=True))
        tools = [
            asyncio.create_task(client.execute(sleep, b"", ProgramLimits(timeout_s=500.0))) for _ in range(9)
        ]
        await programs(8)
        [right] = await client.score([coding._replace(response="print(input())")])
        assert isinstance(right, Graded)
        assert right.value == 1.0
        hasty = RewardClient(client.address, Caller(token=TOKEN), timeout_s=0.3)
        with pytest.raises(ServiceUnavailableError, match=r"Execute at .*: no answer within 0\.3 s"):
            await hasty.execute("print(1)", b"", ProgramLimits())  # waits until its deadline
        await hasty.close()
        assert not any(task.done() for task in tools)
        for task in tools:
            task.cancel()
        await asyncio.wait(tools)

        before = set(psutil.Process().children(recursive=True))
        slow = [item(index, sleep)._replace(ground_truth=coding.ground_truth) for index in range(8)]
        graded = asyncio.create_task(client.score(slow))
        await programs(8)
        assert (await client.execute("print(1)", b"", ProgramLimits())).stdout == b"1\n"
        assert not graded.done()
        graded.cancel()


async def test_graders_of_a_file_of_the_workspace(tmp_path: Path) -> None:
    """Inline, isolated and of a user's own: a missing file is graded as an empty one, with a reason."""
    (tmp_path / "own.py").write_text("def grade(item): return len(item.response)")
    own = f"{tmp_path / 'own.py'}:grade"
    names = ["exact_match", "maths", own, "normalized_match"]
    tables = [{"name": name, "file": "out/answer.txt"} for name in names[:3]] + [{"name": names[3]}]
    tables[1]["wrong"] = -1.0
    environment = {"out/answer.txt": "46", "other.txt": "45"}
    items = [
        item(0, "the answer is in the file")._replace(environment=environment),
        item(1, "46")._replace(environment={"other.txt": "46"}),
    ]
    async with grading(*[GraderConfig.model_validate(table) for table in tables]) as client:
        verdicts = {verdict.id: verdict for verdict in await client.score(items)}
    there, missing = (verdicts[item.id] for item in items)
    assert isinstance(there, Graded)
    assert isinstance(missing, Graded)
    assert there.components == dict(zip(names, [1.0, 1.0, 2.0, 0.0], strict=True))
    assert missing.components == dict(zip(names, [0.0, -1.0, 0.0, 1.0], strict=True))
    assert missing.reasons == dict.fromkeys(names[:3], "no file: out/answer.txt")
    with pytest.raises(ValueError, match="server:judge: servers get replies, not files: remove file"):
        GraderConfig(name="server:judge", file="answer.txt")


async def test_code_in_a_file_is_all_of_the_file() -> None:
    """A fence in a docstring of it begins no block; also if `code` is chosen by the row's source."""
    right = 'def add(a, b):\n    """\n```python\ndef add(a, b): return 3\n```\n    """\n    return a + b\n'
    broken = "```python\ndef add(a, b): return a + b\n```\n"  # a response, but no file of Python
    forged = "import os, sys\nprint('passed')\nos._exit(0)"
    tests = json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]})
    items = [
        item(index, "done")._replace(environment={"s.py": text}, ground_truth=tests, data_source="taco")
        for index, text in enumerate([right, broken, forged, " \n"])
    ]
    items.append(item(4, right)._replace(ground_truth=tests, data_source="taco"))
    names = ["code", "data_source"]
    async with grading(*[GraderConfig.model_validate({"name": name, "file": "s.py"}) for name in names]) as c:
        verdicts = {verdict.id: verdict for verdict in await c.score(items)}
    reasons = []
    for graded in (verdicts[item.id] for item in items):
        assert isinstance(graded, Graded)
        reasons.append({reason.partition(": case")[0] for reason in graded.reasons.values()})
        assert graded.value == (2.0 if graded.id.index == 0 else 0.0)
    assert reasons == [{"passed"}, {"compile error"}, {"no answer"}, {"no code"}, {"no file: s.py"}]


@pytest.mark.long
async def test_the_process_finishes_what_it_grades_and_takes_its_workers_with_it(
    grader: GraderConfig, tmp_path: Path, began: Path, go: Path
) -> None:
    """Stops it like the launcher: the whole process group gets SIGTERM."""
    process, address = start_reward_process(tmp_path, reward={"graders": [{"name": grader.name}]})
    client = RewardClient(address, Caller(token=TOKEN), timeout_s=20.0)
    call = asyncio.create_task(client.score([item(1, "46", began=began, go=go)]))
    try:
        await opened(began)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 3  # the server that workers are forked from, a worker, a resource tracker
        os.killpg(process.pid, signal.SIGTERM)
        await opened(go)
        assert await call == [Graded(item(1, "").id, 0.1, {grader.name: 0.1})]
        _, log = await asyncio.to_thread(process.communicate, timeout=20)
    finally:
        await client.close()
        process.kill()  # if it has not ended by itself
    assert process.returncode == 0, log.decode()
    assert await all_gone(children)


@pytest.mark.long
async def test_a_process_that_is_killed_takes_even_a_worker_that_hangs_with_it(
    grader: GraderConfig, tmp_path: Path, began: Path
) -> None:
    process, address = start_reward_process(tmp_path, reward={"graders": [{"name": grader.name}]})
    client = RewardClient(address, Caller(token=TOKEN), timeout_s=20.0)
    call = asyncio.create_task(client.score([item(1, "hang", began=began)]))
    try:
        await opened(began)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 3
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate, timeout=20)
    with pytest.raises(ServiceUnavailableError):
        await call
    await client.close()
    assert await all_gone(children)


def test_the_process_says_which_grader_it_lacks(tmp_path: Path) -> None:
    process, address = start_reward_process(tmp_path, reward={"graders": [{"name": "exact"}]})
    _, log = process.communicate(timeout=20)
    assert (address, process.returncode) == ("", 1)
    cause = log.decode().strip().rpartition("reward.graders = ")[2]
    assert cause.startswith("'exact': no such function; did you mean exact_match? Known: ")
    assert cause.endswith(", or file.py:function of your own")
