"""The weight receiver inside each tensor-parallel worker of a stock SGLang server.

SGLang calls `refit` on its scheduler thread, in every worker, for each /update_weights_from_tensor that names
it. The first call starts a thread with a small gRPC server (atoll.v1.Worker) on a unix socket, where the
rollout service attaches, and through which a version arrives in a staging buffer while generation continues.
A later call takes over what the service has had prepared: on a GPU, where CUDA graphs point at the
parameters, by a copy into them, on a CPU by an exchange of their memory with the staging buffer.
"""

import asyncio
import logging
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import grpc.aio
import torch

from atoll.config.load import worker_sockets
from atoll.rollout.engines.adapters import AdapterBuffer
from atoll.rollout.engines.local_weights import BufferLayout
from atoll.rollout.engines.sglang.merged_adapters import MergedAdapters
from atoll.rollout.engines.sglang.parameters import shard_layout
from atoll.rollout.refit import Refit
from atoll.runtime.errors import UserError, WeightPushError
from atoll.runtime.model_spec import read_spec
from atoll.runtime.server import Server
from atoll.weights.boxes import box_view
from atoll.weights.transport.base import open_receiver
from atoll.wire.codec.values import decode_version
from atoll.wire.codec.weights import decode_attach, decode_push_part, decode_shard_layout, encode_shard_layout
from atoll.wire.types import ShardLayout, Version
from atoll.wire.v1 import rollout_pb2, worker_pb2, worker_pb2_grpc

_log = logging.getLogger(__name__)

START_S = 30.0  # for the server thread
# Interpreter switch interval. With Python's default of 5 ms, threads would starve: an idle scheduler spins
# through calls that release the interpreter for microseconds, which restarts the wait.
SWITCH_S = 1e-6
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

Context = grpc.aio.ServicerContext[Any, Any]


def socket_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def outcome_path(folder: Path, rank: int) -> Path:
    """Of a file: the rank's scheduler thread writes it before SGLang answers, in which a call might have to
    wait for that thread."""
    return folder / f"outcome-{rank}"


def commit_outcome(version: Version) -> str:
    """The outcome of a successful commit."""
    return f"{version} is live"


def refit(model: torch.nn.Module, named_tensors: object) -> None:
    """The first call serves the model's parameters to the service; later ones commit what is prepared.

    Never raises: an exception on the scheduler thread would end the server. What goes wrong the service
    learns from Attach or from the outcome. `named_tensors` is empty.
    """
    try:
        _worker_of(model).commit_prepared()
    except Exception:
        _log.exception("weight receiver failed")


@cache  # one receiver per process
def _worker_of(model: torch.nn.Module) -> "Worker":
    from sglang.srt.runtime_context import get_model, get_parallel

    rank, size = get_parallel().tp_rank, get_parallel().tp_size
    on_gpu = next(model.parameters()).is_cuda
    folder = worker_sockets()
    path, outcome = socket_path(folder, rank), outcome_path(folder, rank)
    worker = Worker(model, Path(get_model().model_path), rank, size, outcome, in_place=on_gpu)
    listening: Future[None] = Future()

    async def serve() -> None:
        """Answers the service's calls for as long as the process lives."""
        try:
            server = await Server.start_local("atoll.v1.Worker", worker.add_to, socket_path=path)
        except Exception as error:
            listening.set_exception(error)
            return
        listening.set_result(None)
        try:
            await asyncio.Event().wait()
        finally:
            await server.stop(0)

    sys.setswitchinterval(SWITCH_S)
    Thread(target=asyncio.run, args=(serve(),), name="atoll-weights", daemon=True).start()
    listening.result(START_S)
    return worker


class Worker(worker_pb2_grpc.WorkerServicer):
    """One rank. The service calls one method at a time; all but `commit_prepared` run beside generation."""

    def __init__(
        self, model: torch.nn.Module, folder: Path, rank: int, size: int, outcome: Path, *, in_place: bool
    ) -> None:
        """`folder` is where the model came from; `outcome` records how each commit ended. `in_place`: the
        parameters stay where they are in memory."""
        self._model, self._folder, self._rank, self._size = model, folder, rank, size
        self._outcome, self._in_place = outcome, in_place
        self._buffers: list[torch.Tensor] = []  # that versions are pushed into
        self._merged: MergedAdapters | None = None  # if only adapters are pushed
        self._refit: Refit | None = None
        self._prepared: Version | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)

    def commit_prepared(self) -> None:
        """On the scheduler thread, while no batch is being launched."""
        version, self._prepared = self._prepared, None
        if version is None:
            return
        assert self._refit is not None
        try:
            _synchronize(self._buffers[0])  # a batch launched before may still read the parameters
            self._buffers = self._refit.commit(version)
            if self._merged is not None:
                self._merged.merge(self._buffers[0])
            elif not self._in_place:
                for parameter, buffer in zip(self._model.parameters(), self._buffers, strict=True):
                    parameter.data = buffer.view_as(parameter)
            _synchronize(self._buffers[0])
        except Exception as error:
            _log.exception("rank %d could not commit %s", self._rank, version)
            self._outcome.write_text(f"{version}: {error}")
        else:
            self._outcome.write_text(commit_outcome(version))

    async def Attach(self, request: worker_pb2.AttachRequest, context: Context) -> worker_pb2.AttachReply:
        version, setup = decode_attach(request)
        found = dict(self._model.named_parameters())  # tied ones appear once
        dtype = _check(self._model, found)
        spec = read_spec(self._folder)
        mine = shard_layout({name: p.shape for name, p in found.items()}, spec, self._rank, self._size)
        self._buffers = [parameter.detach().view(-1) for parameter in found.values()]
        if setup.lora is not None:
            adapters = AdapterBuffer(BufferLayout(spec).shard_layout, setup.lora)
            self._merged = MergedAdapters(adapters, self._buffers, mine)
            mine, self._buffers = adapters.shard_layout, [adapters.zeros(self._buffers[0])]

        def stage() -> Refit:
            with _copy_stream(self._buffers[0]):
                return Refit(
                    self._buffers,
                    version,
                    open_receiver(setup.transport, setup.deadline_s),
                    self._rank,
                    in_place=self._in_place,
                    staging=setup.staging,
                    takes_turns=setup.takes_turns,
                )

        self._refit = await asyncio.to_thread(stage)
        return worker_pb2.AttachReply(shard_layout=encode_shard_layout(mine), dtype=DTYPES[dtype])

    async def Receive(
        self, request: rollout_pb2.ReceiveWeightsRequest, context: Context
    ) -> rollout_pb2.ReceiveWeightsReply:
        refit = self._require_attached()

        def receive() -> int:
            with _copy_stream(self._buffers[0]):
                return refit.receive(decode_push_part(request))

        return rollout_pb2.ReceiveWeightsReply(num_bytes=await asyncio.to_thread(receive))

    async def Rollback(
        self, request: rollout_pb2.RollbackWeightsRequest, context: Context
    ) -> rollout_pb2.RollbackWeightsReply:
        self._prepared = None
        await asyncio.to_thread(self._require_attached().rollback, decode_version(request.version))
        return rollout_pb2.RollbackWeightsReply()

    async def Release(
        self, request: rollout_pb2.ReleaseRequest, context: Context
    ) -> rollout_pb2.ReleaseReply:
        await asyncio.to_thread(self._require_attached().release)
        return rollout_pb2.ReleaseReply()

    async def Restore(
        self, request: rollout_pb2.RestoreRequest, context: Context
    ) -> rollout_pb2.RestoreReply:
        await asyncio.to_thread(self._require_attached().restore)
        return rollout_pb2.RestoreReply()

    async def Prepare(self, request: worker_pb2.PrepareRequest, context: Context) -> worker_pb2.PrepareReply:
        version = decode_version(request.version)
        await asyncio.to_thread(self._require_attached().check, version)
        self._prepared = version
        return worker_pb2.PrepareReply()

    async def Read(self, request: worker_pb2.ReadRequest, context: Context) -> worker_pb2.ReadReply:
        boxes = decode_shard_layout(request.boxes)
        return worker_pb2.ReadReply(data=await asyncio.to_thread(self._read, boxes))

    def _read(self, boxes: ShardLayout) -> bytes:
        with _copy_stream(self._buffers[0]):
            views = [
                box_view(self._buffers[buffer], rows, columns, offset, stride)
                for _, _, rows, _, columns, buffer, offset, stride in boxes.boxes.tolist()
            ]
            return b"".join(view.cpu().contiguous().view(torch.uint8).numpy().tobytes() for view in views)

    def _require_attached(self) -> Refit:
        if self._refit is None:
            raise WeightPushError(f"rank {self._rank}: a call before Attach, which opens the staging buffer")
        return self._refit


def _check(model: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The parameters' one dtype. Raises UserError if they are not kept as they were loaded."""
    dtypes = {parameter.dtype for parameter in parameters.values()}
    if len(dtypes) > 1 or not dtypes <= DTYPES.keys():
        raise UserError(
            f"SGLang's parameters have the dtypes {sorted(map(str, dtypes))}; weights can be pushed "
            "only to float32 or bfloat16: set rollout.dtype, and remove rollout.sglang.quantization"
        )
    for name, parameter in parameters.items():
        if not parameter.is_contiguous():
            raise UserError(f"SGLang's parameter {name!r} is not contiguous: weights cannot be pushed to it")
    for name, module in model.named_modules():
        if reason := _describe_rearrangement(module):
            raise UserError(f"SGLang keeps the weights of {name!r} {reason}")
    return dtypes.pop()


def _describe_rearrangement(module: torch.nn.Module) -> str:
    """How its matrices differ from those of the checkpoint where their shapes do not tell; "" where they are
    the same."""
    method = getattr(module, "quant_method", None)
    if torch.version.hip is not None:
        return "shuffled for ROCm, where weights cannot be pushed to it"
    if getattr(module, "use_intel_amx_backend", False):
        return 'packed for AMX, where weights cannot be pushed to it: set rollout.dtype = "float32"'
    if getattr(method, "load_up_proj_weight_first", False):
        return 'with up before gate: set rollout.sglang.moe_runner_backend = "triton"'
    if getattr(method, "w13_swiglu_interleaved", False):
        return "with gate and up interleaved: unset SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"
    return ""


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _copy_stream(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """On a GPU, a stream of its own for what this thread copies."""
    if not tensor.is_cuda:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(tensor.device))  # type: ignore[no-untyped-call]
