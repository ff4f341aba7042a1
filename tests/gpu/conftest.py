"""These tests need a GPU and check kernels; other tests check the logic on a CPU."""

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is here, or it is hidden: run `make test-gpu`")
    return torch.device("cuda")
