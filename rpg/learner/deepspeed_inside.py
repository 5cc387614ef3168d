"""The only code that uses DeepSpeed's internals. If a version changes one of them, a test fails."""

from typing import Any


def ask_torch_for_memory() -> None:
    """Makes DeepSpeed ask torch for a GPU's free memory.

    If `pynvml` is installed, DeepSpeed 0.19 asks NVML, by the numbers in CUDA_VISIBLE_DEVICES. A slot names its GPU
    there by UUID, and DeepSpeed fails when it parses that as a number (fixed by its pull request 8510).
    """
    from deepspeed.accelerator import cuda_accelerator, get_accelerator

    get_accelerator()  # its constructor imports pynvml
    cuda_accelerator.pynvml = None


def show_shards(optimizer: Any) -> None:
    """Copies the float32 shards of a ZeRO 3 optimizer into the module's shards, and gathers the parameters that
    DeepSpeed keeps whole."""
    for group in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    if persistent := optimizer.persistent_parameters:
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)


def fragment(parameter: Any) -> tuple[int, int, int] | None:
    """Returns the piece of a ZeRO 1 or 2 parameter in this rank's partition; None if the partition holds none of it.

    Returns:
        first element in the parameter, first element in the partition, number of elements.
    """
    mapping = parameter._hp_mapping
    if mapping is None or not mapping.lp_fragment_address.numel:
        return None
    return mapping.lp_fragment_address.start, mapping.hp_fragment_address.start, mapping.lp_fragment_address.numel
