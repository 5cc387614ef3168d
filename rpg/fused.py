"""Models whose norms, rotations and gates Liger-Kernel's programs can compute, by their settings. No torch here."""

from importlib.util import find_spec

from specs.errors import Issue

MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Architectures whose logprobs and gradients with these kernels are held against PyTorch's by the tests."""
_ACTIVATIONS = ("silu", "swish")
"""Two names of the one activation that Liger's gated MLP has. It takes the place of any other without a word."""
_PATH = ("training", "kernels")


def lacks_kernels(model_type: str, activation: str) -> Issue | None:
    """Why Liger's kernels cannot compute a model, or are not there; None where they can."""
    if model_type not in MODEL_TYPES:
        return Issue(
            "Liger's kernels are not tried with this architecture",
            _PATH,
            given=f"liger for {model_type}",
            allowed=f"liger for {', '.join(MODEL_TYPES)}",
            hint="leave kernels out",
        )
    if activation not in _ACTIVATIONS:
        return Issue(
            "Liger's gated MLP has another activation than this model",
            _PATH,
            given=f"liger for hidden_act {activation}",
            allowed=f"liger for hidden_act {' or '.join(_ACTIVATIONS)}",
            hint="leave kernels out",
        )
    if find_spec("liger_kernel") is None:
        hint = "pip install 'rpg-experiments[liger]'"
        return Issue("Liger-Kernel is not installed", _PATH, given="liger", hint=hint)
    return None
