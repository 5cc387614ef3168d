"""The only places that reach into what DeepSpeed does not promise; a version that changes one fails a test of it."""

from typing import Any


def ask_torch_for_memory() -> None:
    """Has DeepSpeed take a GPU's free memory from torch.

    Where `pynvml` is installed DeepSpeed 0.19 asks NVML, by the numbers in CUDA_VISIBLE_DEVICES; a slot names its GPU
    there by UUID, and DeepSpeed fails as it reads that as a number (its pull request 8510 mends it).
    """
    from deepspeed.accelerator import cuda_accelerator, get_accelerator

    get_accelerator()  # as it is made it imports pynvml
    cuda_accelerator.pynvml = None


def show_shards(optimizer: Any) -> None:
    """Copies the float32 shards of a ZeRO 3 optimizer into the module's, and gathers the parameters that stay whole."""
    for group in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    if persistent := optimizer.persistent_parameters:
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)


def fragment(parameter: Any) -> tuple[int, int, int] | None:
    """The piece of a ZeRO 1 or 2 parameter that this rank's partition holds, None where it holds none.

    Returns:
        first element in the parameter, first element in the partition, number of elements.
    """
    mapping = parameter._hp_mapping
    if mapping is None or not mapping.lp_fragment_address.numel:
        return None
    return mapping.lp_fragment_address.start, mapping.hp_fragment_address.start, mapping.lp_fragment_address.numel
