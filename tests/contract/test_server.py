"""What every server of ours does with every call, over real gRPC on loopback."""
# ruff: noqa: N802 gRPC gives the methods their names

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.rollout import RolloutClient
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.errors import (
    AtollError,
    ProtocolError,
    ServiceUnavailableError,
    StaleFenceError,
    UnauthenticatedError,
    UserError,
    WeightPushError,
)
from atoll.runtime.server import Fence, Server, TokenGrant
from atoll.wire.codec.batches import put_segments
from atoll.wire.codec.trajectories import encode_payload
from atoll.wire.types import PauseMode, Segments
from atoll.wire.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc, types_pb2
from tests.builders import node, sample, sample_id
from tests.tokens import CALLER, TOKEN

BEARER = ("authorization", f"Bearer {TOKEN}")


class FakeRollout(rollout_pb2_grpc.RolloutServicer):
    """Answers by what the request asks for; counts what reached it."""

    def __init__(self) -> None:
        self.calls = 0
        self.answer = b""  # to Generate
        self.time_left: list[float] = []  # of its calls

    async def Info(self, request, context):  # type: ignore[no-untyped-def]
        self.calls += 1
        return rollout_pb2.RolloutInfoReply(name="r" * (10 << 20))

    async def Pause(self, request, context):  # type: ignore[no-untyped-def]
        self.calls += 1
        return rollout_pb2.PauseReply(running=7)

    async def Abort(self, request, context):  # type: ignore[no-untyped-def]
        self.calls += 1
        match request.id_prefix:
            case "push":
                raise WeightPushError("tensor lm_head: checksum 1, expected 2")
            case "bug":
                raise KeyError("no such slot")
            case "long":
                raise UserError("x" * 100_000)
            case "own":
                await context.abort(grpc.StatusCode.OUT_OF_RANGE, "its own words")
            case "ending":  # what gRPC may answer for a handler that the end of the process cuts off
                await context.abort(grpc.StatusCode.CANCELLED)
        return rollout_pb2.AbortReply(aborted=3)

    async def Generate(self, request, context):  # type: ignore[no-untyped-def]
        self.time_left.append(context.time_remaining())
        yield rollout_pb2.GenerateReply(turns=self.answer)
        if not self.answer:
            raise WeightPushError("in the middle of a stream")


class FakeTrainer(trainer_pb2_grpc.TrainerServicer):
    def __init__(self) -> None:
        self.looks = 0  # at its progress
        self.looked = asyncio.Event()  # often
        self.hangs = False

    async def Progress(self, request, context):  # type: ignore[no-untyped-def]
        self.looks += 1
        if self.looks == 20:
            self.looked.set()
        return types_pb2.ProgressReply(count=7 if self.hangs else self.looks)

    async def LoadHF(self, request, context):  # type: ignore[no-untyped-def]
        await self.looked.wait()
        return trainer_pb2.LoadHFReply()

    async def ForwardBackward(self, request_iterator, context):  # type: ignore[no-untyped-def]
        chunks = [request async for request in request_iterator]
        return trainer_pb2.ForwardBackwardReply(metrics={"chunks": len(chunks)})

    async def ComputeLogprobs(self, request_iterator, context):  # type: ignore[no-untyped-def]
        async for _ in request_iterator:
            yield trainer_pb2.ComputeLogprobsReply()


@asynccontextmanager
async def serving(
    servicer: FakeRollout, token: str = TOKEN, fence: Fence | None = None
) -> AsyncIterator[str]:
    server = await Server.start(
        "atoll.v1.Rollout",
        lambda s: rollout_pb2_grpc.add_RolloutServicer_to_server(servicer, s),
        host="127.0.0.1",
        port=0,
        token=token,
        setting="--port",
        fence=fence,
    )
    try:
        yield server.address
    finally:  # a server that is left to the garbage collector hangs it
        await server.stop(0)


@asynccontextmanager
async def serving_trainer(servicer: FakeTrainer) -> AsyncIterator[str]:
    server = await Server.start(
        "atoll.v1.Trainer",
        lambda s: trainer_pb2_grpc.add_TrainerServicer_to_server(servicer, s),
        host="127.0.0.1",
        port=0,
        token=TOKEN,
        setting="--port",
    )
    try:
        yield server.address
    finally:  # a server that is left to the garbage collector hangs it
        await server.stop(0)


@pytest.fixture
async def servicer() -> FakeRollout:
    return FakeRollout()


@pytest.fixture
async def address(servicer: FakeRollout) -> AsyncIterator[str]:
    async with serving(servicer) as address:
        yield address


@asynccontextmanager
async def calling(
    address: str, fence: int | None = None, token: str | None = TOKEN
) -> AsyncIterator[RolloutClient]:
    client = RolloutClient(address, Caller(fence, token), timeout_s=5)
    yield client
    await client.close()


async def test_a_call_without_a_deadline_is_refused_before_it_does_anything(
    address: str, servicer: FakeRollout
) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rollout_pb2_grpc.RolloutStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Info(rollout_pb2.RolloutInfoRequest(), metadata=[BEARER])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "/atoll.v1.Rollout/Info: the call has no deadline; set a timeout"
    assert servicer.calls == 0


async def test_a_lower_epoch_is_refused_once_a_higher_one_has_called(
    address: str, servicer: FakeRollout
) -> None:
    async with calling(address, fence=5) as old, calling(address, fence=6) as new:
        await old.pause(PauseMode.WAIT)
        await new.pause(PauseMode.WAIT)
        await new.pause(PauseMode.WAIT)  # its own epoch stays welcome
        assert servicer.calls == 3
        with pytest.raises(StaleFenceError, match="epoch 5 is over, epoch 6 has begun"):
            await old.pause(PauseMode.WAIT)
        assert servicer.calls == 3


async def test_an_epoch_that_the_coordinator_does_not_confirm_locks_nobody_out() -> None:
    now = 7
    asked = 0

    async def confirmed() -> int:
        nonlocal asked
        asked += 1
        return now

    servicer, fence = FakeRollout(), Fence(confirmed)
    async with serving(servicer, fence=fence) as address:

        async def pause(epoch: int) -> None:
            async with calling(address, fence=epoch) as client:
                await client.pause(PauseMode.WAIT)

        for wrong, why in ((6, "epoch 6 is over, epoch 7 has begun"), (2**62, "has not begun.* says 7")):
            with pytest.raises(StaleFenceError, match=why):  # the first as by a service that was restarted
                await pause(wrong)
        await pause(7)
        assert (servicer.calls, asked) == (1, 2)
        now = 8  # another coordinator has taken over
        await pause(8)
        with pytest.raises(StaleFenceError, match="epoch 7 is over"):
            await pause(7)
        fence.rise(9)  # as a heartbeat says
        with pytest.raises(StaleFenceError, match="epoch 8 is over, epoch 9 has begun"):
            await pause(8)
        assert (servicer.calls, asked) == (2, 3)


async def test_who_holds_no_fence_may_look_and_not_touch(address: str, servicer: FakeRollout) -> None:
    async with grpc.aio.insecure_channel(
        address, options=[("grpc.max_receive_message_length", 64 << 20)]
    ) as channel:
        request = rollout_pb2.RolloutInfoRequest()
        info = await rollout_pb2_grpc.RolloutStub(channel).Info(request, timeout=5, metadata=[BEARER])
        assert len(info.name) == 10 << 20  # beyond gRPC's default limit of 4 MiB
    async with calling(address) as client:
        with pytest.raises(StaleFenceError, match="only a coordinator may call it"):
            await client.pause(PauseMode.WAIT)
    assert servicer.calls == 1


async def test_our_errors_arrive_as_the_class_that_was_raised(address: str) -> None:
    async with calling(address, fence=1) as client:
        with pytest.raises(WeightPushError, match="lm_head: checksum 1, expected 2"):
            await client.abort("push")
        with pytest.raises(UserError) as long:
            await client.abort("long")
        assert 3_000 < len(str(long.value)) < 5_000
        with pytest.raises(AtollError, match="OUT_OF_RANGE: its own words"):
            await client.abort("own")
        assert await client.abort("") == 3


async def test_an_error_in_a_stream_arrives_after_what_came_before(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        call = rollout_pb2_grpc.RolloutStub(channel).Generate(
            rollout_pb2.GenerateRequest(), timeout=5, metadata=(BEARER, ("atoll-fence", "1"))
        )
        assert await call.read() == rollout_pb2.GenerateReply()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    assert caught.value.trailing_metadata()["atoll-error"] == "WeightPushError"


async def test_a_bug_names_itself_and_leaves_its_traceback_in_the_log(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with calling(address, fence=1) as client:
        with pytest.raises(AtollError, match=r"INTERNAL: KeyError: 'no such slot'.*the service's log"):
            await client.abort("bug")
    assert "Traceback" in caplog.text
    assert "Abort failed" in caplog.text


async def test_streams_of_requests_pass_the_gate_too() -> None:
    fenced = (BEARER, ("atoll-fence", "1"))
    requests = [trainer_pb2.ForwardBackwardRequest()] * 3
    async with serving_trainer(FakeTrainer()) as address, grpc.aio.insecure_channel(address) as channel:
        stub = trainer_pb2_grpc.TrainerStub(channel)
        reply = await stub.ForwardBackward(iter(requests), timeout=5, metadata=fenced)
        assert dict(reply.metrics) == {"chunks": 3.0}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ForwardBackward(iter(requests), timeout=5, metadata=[BEARER])
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        chunks = iter([trainer_pb2.ComputeLogprobsRequest()] * 2)
        call = stub.ComputeLogprobs(chunks, timeout=5, metadata=[BEARER])
        assert len([reply async for reply in call]) == 2


async def test_an_epoch_that_ends_while_its_requests_stream_is_refused() -> None:
    request = trainer_pb2.ForwardBackwardRequest()
    async with serving_trainer(FakeTrainer()) as address, grpc.aio.insecure_channel(address) as channel:
        stub = trainer_pb2_grpc.TrainerStub(channel)
        old = stub.ForwardBackward(timeout=5, metadata=(BEARER, ("atoll-fence", "1")))
        await old.write(request)
        await stub.ForwardBackward(iter([request]), timeout=5, metadata=(BEARER, ("atoll-fence", "2")))
        with suppress(grpc.aio.AioRpcError):  # it may know already
            await old.write(request)
            await old.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await old
        assert caught.value.details() == (
            "/atoll.v1.Trainer/ForwardBackward: epoch 1 is over, epoch 2 has begun; "
            "another coordinator took this run over"
        )


async def test_a_refusal_reaches_a_caller_that_goes_on_sending() -> None:
    """Refused before the first of its chunks, it has 20 MB to send: what fails then is the sending."""
    refusal = "/atoll.v1.Trainer/ComputeValues: the call has no deadline; set a timeout"
    chunk = trainer_pb2.ComputeValuesRequest()
    put_segments(chunk.segments, zeros(500, 1000))
    async with serving_trainer(FakeTrainer()) as address, grpc.aio.insecure_channel(address) as channel:
        for _ in range(10):
            call = trainer_pb2_grpc.TrainerStub(channel).ComputeValues(iter([chunk] * 10), metadata=[BEARER])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.details() == refusal


async def test_a_token_is_asked_of_everything_but_health_and_never_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    servicer = FakeRollout()
    async with serving(servicer, TOKEN) as address:
        for wrong in (None, "other-token"):
            async with calling(address, fence=1, token=wrong) as client:
                with pytest.raises(UnauthenticatedError) as caught:
                    await client.pause(PauseMode.WAIT)
                assert TOKEN not in str(caught.value)
                assert "other-token" not in str(caught.value)
        assert servicer.calls == 0
        async with calling(address, fence=1, token=TOKEN) as client:
            await client.pause(PauseMode.WAIT)
        assert servicer.calls == 1
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "atoll.v1.Rollout"):
                reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await described(channel)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert TOKEN not in caplog.text
    assert "other-token" not in caplog.text


async def test_operators_may_call_their_methods_and_no_others() -> None:
    servicer = FakeRollout()
    server = await Server.start(
        "atoll.v1.Rollout",
        lambda s: rollout_pb2_grpc.add_RolloutServicer_to_server(servicer, s),
        host="127.0.0.1",
        port=0,
        token=TOKEN,
        setting="--port",
        operators=TokenGrant("operators-token", frozenset({"Info"})),
    )
    async with calling(server.address, fence=1, token="operators-token") as client:
        assert (await client.info()).name
        with pytest.raises(UnauthenticatedError, match=r"Pause: the operators' token is not enough"):
            await client.pause(PauseMode.WAIT)
    assert servicer.calls == 1
    async with calling(server.address, fence=1) as client:
        await client.pause(PauseMode.WAIT)
        await client.info()
    await server.stop(0)


async def test_an_empty_token_admits_nobody() -> None:
    async with serving(FakeRollout()) as address, calling(address, fence=1, token="") as client:
        with pytest.raises(UnauthenticatedError):
            await client.info()
    with pytest.raises(AssertionError):
        async with serving(FakeRollout(), token=""):
            pytest.fail("it serves")


async def described(channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> list[str]:
    """Names that reflection lists."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for reply in stub.ServerReflectionInfo(iter([request]), metadata=metadata):
        return [service.name for service in reply.list_services_response.service]
    raise AssertionError("reflection did not answer")


async def test_reflection_lists_the_service_without_a_deadline(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        assert "atoll.v1.Rollout" in await described(channel, BEARER)


async def test_a_port_in_use_is_an_error_that_names_port_and_setting(address: str) -> None:
    port = int(address.rpartition(":")[2])
    with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}.*in use.*coordinator\.port.*0 for any"):
        await Server.start(
            "atoll.v1.Coordinator",
            lambda server: None,
            host="127.0.0.1",
            port=port,
            token=TOKEN,
            setting="coordinator.port",
        )


async def test_a_stopped_server_is_unavailable_to_its_callers() -> None:
    async with serving(FakeRollout()) as address:
        pass
    async with calling(address, fence=1) as client:
        with pytest.raises(ServiceUnavailableError, match="the service may have died: see its log"):
            await client.pause(PauseMode.WAIT)


async def test_stopping_waits_for_calls_in_progress() -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    class Slow(FakeRollout):
        async def Pause(self, request, context):  # type: ignore[no-untyped-def]
            reached.set()
            await go_on.wait()
            return rollout_pb2.PauseReply(running=1)

    server = await Server.start(
        "atoll.v1.Rollout",
        lambda s: rollout_pb2_grpc.add_RolloutServicer_to_server(Slow(), s),
        host="127.0.0.1",
        port=0,
        token=TOKEN,
        setting="--port",
    )
    async with calling(server.address, fence=1) as client:
        call = asyncio.create_task(client.pause(PauseMode.WAIT))
        await asyncio.wait_for(reached.wait(), 5)
        stopping = asyncio.create_task(server.stop(5))
        go_on.set()
        await asyncio.wait_for(call, 5)
        await asyncio.wait_for(stopping, 5)
        assert call.exception() is None


async def test_a_call_cancelled_by_an_ending_service_finds_it_unavailable(address: str) -> None:
    async with calling(address, fence=1) as client:
        with pytest.raises(ServiceUnavailableError, match="the service is shutting down"):
            await client.abort("ending")


def zeros(num_groups: int, length: int) -> Segments:
    """Each segment a group of its own."""
    return Segments(
        token_ids=np.zeros(num_groups * length, np.int32),
        offsets=np.arange(num_groups + 1, dtype=np.int64) * length,
        parents=np.full(num_groups, -1, np.int32),
        groups=np.arange(num_groups, dtype=np.int32),
    )


async def test_a_peer_that_dies_while_requests_stream_to_it_is_unavailable() -> None:
    """About every second such call ends with INTERNAL, which grpc.aio says by itself."""

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))  # HTTP/2's empty SETTINGS: the connection stands
        await reader.read(1000)
        writer.transport.abort()

    async with await asyncio.start_server(reset, "127.0.0.1", 0) as peer:
        address = f"127.0.0.1:{peer.sockets[0].getsockname()[1]}"
        for _ in range(6):
            client = TrainerClient(address, CALLER, 5)
            with pytest.raises(ServiceUnavailableError, match="the connection failed"):
                await client.compute_values(zeros(50, 1000))
            await client.close()


async def test_a_call_lasts_as_long_as_its_work_makes_progress() -> None:
    """20 looks are two and a half times the silence that the client allows."""
    trainer = FakeTrainer()
    async with serving_trainer(trainer) as address:
        client = TrainerClient(address, CALLER, timeout_s=0.8)
        await asyncio.wait_for(client.load_hf(Path("folder")), 60)
        assert trainer.looks >= 20
        await client.close()


async def test_a_call_without_progress_is_given_up() -> None:
    trainer = FakeTrainer()
    trainer.hangs = True
    trainer.looked = asyncio.Event()
    trainer.looks = 1000
    async with serving_trainer(trainer) as address:
        client = TrainerClient(address, CALLER, timeout_s=0.4)
        with pytest.raises(ServiceUnavailableError, match=r"no progress for 0\.4 s"):
            await asyncio.wait_for(client.load_hf(Path("folder")), 60)
        await client.close()


async def test_a_stream_of_samples_has_no_deadline_of_its_own(address: str, servicer: FakeRollout) -> None:
    servicer.answer = encode_payload([sample(sample_id(0, 1), node([4, 5]))])
    async with calling(address, fence=1) as client:
        (arrived,) = [arrival async for arrival in client.generate("actor", [])]
    assert arrived.samples[0].id == sample_id(0, 1)
    assert arrived.payload == servicer.answer  # the very bytes
    assert min(servicer.time_left) > 7 * 86400


async def test_samples_that_cannot_be_read_are_a_bad_answer(address: str, servicer: FakeRollout) -> None:
    servicer.answer = b"\xff\xff"
    async with calling(address, fence=1) as client:
        with pytest.raises(ProtocolError, match="samples: "):
            [arrival async for arrival in client.generate("actor", [])]


async def test_an_answer_that_is_no_message_is_a_bad_answer() -> None:
    """gRPC itself answers None then."""

    async def nonsense(request: bytes, context: object) -> bytes:
        return b"\xff\xff"

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(nonsense)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("atoll.v1.Rollout", {"Info": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with calling(f"127.0.0.1:{port}") as client:
        with pytest.raises(ProtocolError, match=r"Rollout.Info at .*: its response cannot be decoded"):
            await client.info()
    await server.stop(0)
