"""Names of low-rank adapters in files, pushes and checkpoints: PEFT's."""

WEIGHT = ".weight"


def adapter_names(tensor: str) -> tuple[str, str]:
    """The names of A [rank, inputs] and B [outputs, rank] of the canonical tensor `tensor`."""
    layer = f"base_model.model.{tensor.removesuffix(WEIGHT)}"
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def is_target(tensor: str, targets: tuple[str, ...]) -> bool:
    """Whether it is the matrix of a projection in `targets`, such as "q_proj"."""
    return tensor.endswith(tuple(f".{target}{WEIGHT}" for target in targets))
