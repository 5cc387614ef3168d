"""GPUs with the figures that estimates need: memory, matrix products and bandwidth, from NVIDIA's data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """One kind of GPU."""

    name: str
    """Name with its article, as in a sentence."""
    part: str
    """Substring of the driver's name for the GPU."""
    memory_gib: float
    """Memory that a process can use, as the driver reports it, GiB."""
    flops: float
    """Peak FLOP/s of dense matrix products in bfloat16; 0 if the GPU has no bfloat16."""
    bandwidth: float
    """Bandwidth of the GPU's memory, bytes/s."""


CARDS = (
    Card("a T4", "T4", 15.0, 0.0, 0.32e12),
    Card("an L4", "L4", 22.5, 121e12, 0.30e12),
    Card("an A100 of 40 GB", "A100", 40.0, 312e12, 1.55e12),
    Card("an L40S", "L40S", 45.0, 362e12, 0.86e12),
    Card("an L40", "L40", 45.0, 181e12, 0.86e12),
    Card("an H100 on PCIe", "H100 PCIe", 79.6, 756e12, 2.0e12),
    Card("an H100", "H100", 79.6, 989e12, 3.35e12),
    Card("an A100 of 80 GB", "A100", 80.0, 312e12, 2.04e12),
    Card("an H200", "H200", 140.4, 989e12, 4.8e12),
    Card("a B200", "B200", 179.1, 2250e12, 8.0e12),
)
"""Known cards, from the smallest."""
H100 = next(card for card in CARDS if card.name == "an H100")
"""GPU that estimates assume if no GPU is named."""


def card_named(gpu: str) -> Card | None:
    """Returns the card with the driver's name of a GPU; None if it is not known."""
    known = sorted(CARDS, key=lambda card: -len(card.part))  # an L40S is not an L4
    return next((card for card in known if card.part in gpu), None)


def peak_flops(gpu: str) -> float:
    """Returns the FLOP/s of a GPU in bfloat16, given the driver's name of it; 0 if it is not known."""
    card = card_named(gpu)
    return card.flops if card else 0.0
