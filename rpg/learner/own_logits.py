"""Checks that the policy equals the model, by comparing its logprobs with those of the model's own logits.

The policy multiplies the last hidden states of the model's decoder by the output head. Some architectures also cap or
scale their logits, or have a layer before the head. Without that, training would train another model.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel

from rpg.pretrained import model_without_weights
from specs.errors import Issue, SpecError

logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it logs the error that is caught below

PROBED_TOKENS = 24
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "matmul", "linear"})
_COPIES = frozenset({"_to_copy", "_unsafe_view", "clone", "device", "index", "index_select"})
"""Operations that return some or all elements of a tensor, possibly in another type."""
_NOISE = ("dropout", "_pdrop", "layerdrop", "drop_path", "jitter")
"""Parts of names of settings, in configs and modules, for noise in training mode."""


def check_logits(config: PretrainedConfig) -> None:
    """Checks that logits are the last hidden state times the head's weight. Works without the model's values.

    Raises:
        SpecError: the architecture computes its logits in another way.
    """
    if reason := _other_way_to_logits(config):
        raise _refused(config, reason)


def prove_policy(policy: Callable[..., Any], config: PretrainedConfig, device: torch.device) -> None:
    """Proves on a few tokens that two passes of the policy agree, and agree with the model's own logits.

    All ranks call it.

    Args:
        policy: takes what `rpg.learner.policy.Policy.forward` takes.
        config: config of its model.
    Raises:
        SpecError: the logprobs differ by more than rounding.
    """
    vocabulary = config.get_text_config().vocab_size
    ids = torch.arange(11, 11 + 7919 * PROBED_TOKENS, 7919, device=device) % vocabulary
    sources = torch.arange(PROBED_TOKENS - 1, device=device)
    try:
        with torch.no_grad():
            first, second = (policy(ids[None], sources, ids[1:], 1.0)[0] for _ in range(2))
            own, rounding = policy(ids[None], sources, ids[1:], 1.0, own_logits=True)
    except (AttributeError, TypeError, LookupError, NotImplementedError) as error:
        raise _refused(config, f"it does not run on token ids alone ({type(error).__name__}: {error})"[:300]) from error
    allowed = 1e-3 + float(rounding)
    for other, whose in ((second, "a second pass over the same tokens"), (own, "the model's own logits")):
        difference = float((first - other).abs().max())
        if not difference <= allowed:  # NaN too
            raise _refused(config, f"the policy's logprobs differ by {difference:.3g} nats from those of {whose}")


def switch_off_noise(model: PreTrainedModel) -> None:
    """Switches off dropout, jitter and similar noise, in the configs and in modules that have copied the settings.

    The importance ratio compares two passes, so noise in training mode would count as a change of the policy.
    """
    for module in model.modules():
        holders = [module, *(each for each in vars(module).values() if isinstance(each, PretrainedConfig))]
        for holder in holders:
            for name, value in list(vars(holder).items()):
                if isinstance(value, float) and any(part in name for part in _NOISE):
                    setattr(holder, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _refused(config: PretrainedConfig, reason: str) -> SpecError:
    return SpecError(
        Issue(
            "this architecture cannot be trained: the trained policy would differ from the model",
            path=("model",),
            given=f"{config.model_type}: {reason}",
            hint="docs/own-model.md lists the architectures that train",
        )
    )


def _other_way_to_logits(config: PretrainedConfig) -> str:
    """Returns the model's operations between last hidden state and logits, other than the head's product.

    The result is empty if there are none or if they cannot be determined. Tensors are fake, so operations are recorded
    and nothing is computed."""
    for layers in (False, True):  # some decoders require their layers
        try:
            return _in_tail(config, layers=layers)
        except ImportError as error:  # it could not be opened either
            return f"it needs a package that is not installed ({' '.join(str(error).split())})"[:300]
        except Exception:  # for example an operation that takes no fake tensors: then `prove_policy` decides
            continue
    return ""


def _in_tail(config: PretrainedConfig, *, layers: bool) -> str:
    """Runs the model and returns the same as `_other_way_to_logits`. Raises any error of the model.

    Args:
        layers: whether the layers run too. The operations after the last layer are the same without them.
    """
    model = model_without_weights(config).bfloat16().eval()  # type: ignore[no-untyped-call]
    decoder, head = model.base_model, model.get_output_embeddings()
    if decoder is model or head is None:
        return "it has no decoder with an output head of its own"
    if not layers:
        for name, module in decoder.named_children():
            if isinstance(module, nn.ModuleList) and len(module) > 1:
                setattr(decoder, name, nn.ModuleList())
    tail = _Tail(head)
    for part in {decoder, model.get_decoder()}:  # some models call only a part of their declared base model
        part.register_forward_hook(tail.begin)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), tail:
        ids = torch.zeros(1, PROBED_TOKENS, dtype=torch.int64, device="meta")
        logits = model(input_ids=ids, use_cache=False).logits
    if tail.others:
        return f"its logits go through {', '.join(dict.fromkeys(tail.others))}"
    if tail.products != 1 or not tail.holds(logits):
        return "its logits are not the product of its last hidden state and its output head"
    return ""


class _Tail(TorchDispatchMode):
    """Mode that records the operations on a decoder's output, up to the logits."""

    def __init__(self, head: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = 0
        self.others: list[str] = []
        """Names of operations that are neither copies nor the head's product."""
        self._of_head = [head.weight]
        self._hidden: list[Tensor] = []

    def begin(self, _module: nn.Module, _arguments: Any, outputs: Any) -> None:
        """Starts the recording. It is a hook that runs after the decoder's pass."""
        if (states := getattr(outputs, "last_hidden_state", None)) is not None:
            self._hidden = [states]

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether a tensor was computed from the last hidden state."""
        return any(tensor is each for each in self._hidden)

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        out = operation(*arguments, **(keywords or {}))
        tensors = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        of_head = any(tensor is each for tensor in tensors for each in self._of_head)
        if any(map(self.holds, tensors)):
            name = operation.overloadpacket.__name__
            if of_head and name in _PRODUCTS:
                self.products += 1
            elif not (operation.is_view or name in _COPIES or _is_identity(name, arguments)):
                self.others.append(name)
            self._hidden += made
        elif of_head:
            self._of_head += made
        return out


def _is_identity(name: str, arguments: Any) -> bool:
    """Returns whether an operation multiplies or divides by the number 1."""
    return name.rstrip("_") in ("mul", "div") and not isinstance(arguments[1], Tensor) and arguments[1] == 1
