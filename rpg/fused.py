"""Finds out from a model's settings whether Liger-Kernel can compute its norms, rotations and gates. Does not import
torch."""

from importlib.util import find_spec

from specs.errors import Issue

MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Architectures for which tests compare the logprobs and gradients of these kernels with PyTorch's."""
_ACTIVATIONS = ("silu", "swish")
"""The two names of the only activation in Liger's gated MLP. Liger silently replaces any other activation by it."""
_PATH = ("training", "kernels")


def lacks_kernels(model_type: str, activation: str) -> Issue | None:
    """Returns why Liger's kernels cannot compute a model or are not installed; None if they can compute it."""
    if model_type not in MODEL_TYPES:
        return Issue(
            "Liger's kernels have not been tested with this architecture",
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
