"""GPUs by their UUID, which every process knows; device numbers depend on CUDA_VISIBLE_DEVICES."""

import torch


def device_uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def find_device(uuid: str) -> int | None:
    """The device number in this process; None if the process does not see the GPU."""
    visible = (device for device in range(torch.cuda.device_count()) if device_uuid(device) == uuid)
    return next(visible, None)
