"""Copies to the host, as of a GPU: a stand-in for the CUDA runtime records what is pinned."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from atoll.trainer.checkpoint import Checkpointer
from atoll.trainer.offload import HostMemory


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def on_gpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.as_subclass(OnGpu) for tensor in tensors]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Bytes by address."""
    held: dict[int, int] = {}

    def register(address: int, num_bytes: int, flags: int) -> int:
        held[address] = num_bytes
        return 0

    def unregister(address: int) -> int:
        del held[address]
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return held


def test_exactly_the_copies_are_pinned_until_their_owner_ends(pinned: dict[int, int]) -> None:
    """PyTorch's own allocator would round 1032 to 2048 bytes."""
    sources = [torch.arange(129.0), torch.arange(3, dtype=torch.int16), torch.randn(16, 4).bfloat16()]
    host = HostMemory()
    copies = list(host.copy(on_gpu(*sources)))
    for copy, source in zip(copies, sources, strict=True):
        assert (copy.dtype, copy.shape) == (source.dtype, source.shape)
        assert torch.equal(copy, source)
    [(address, num_bytes)] = pinned.items()
    assert num_bytes == 520 + 8 + 128
    assert address == copies[0].data_ptr()

    list(host.copy(on_gpu(*sources)))
    assert pinned == {address: 656}  # not pinned again
    list(host.copy(on_gpu(torch.ones(2, dtype=torch.int64))))
    assert list(pinned.values()) == [16]
    del host
    assert pinned == {}


def test_nothing_is_pinned_without_a_gpu(pinned: dict[int, int]) -> None:
    source = torch.ones(3)
    [copy] = HostMemory().copy([source])
    source.zero_()
    assert copy.tolist() == [1.0, 1.0, 1.0]
    assert pinned == {}


def test_checkpoints_are_written_on_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str, int]] = []
    monkeypatch.setattr(dist, "new_group", lambda **settings: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, device))
    )
    Checkpointer().close()
    assert chosen == [("checkpoint_0", 3)]
