"""The model in training, as the objective sees it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rpg.batches.ledger import ReferenceRows
from rpg.learner.adapters import add_adapters
from rpg.learner.kernels import use_liger
from rpg.learner.logprobs import Compared, likeliest_tokens, token_divergences, token_logprobs
from rpg.learner.own_logits import check_logits, switch_off_noise
from rpg.learner.packing import ATTENTION, Packing
from rpg.learner.recomputation import recompute_activations
from rpg.learner.sharded_loading import read_on_first_rank
from rpg.objectives.distribution import over_tokens
from rpg.pretrained import config_of, model_of
from rpg.routing import ReplayedRouters, Routing, routed_experts, routing_of
from specs.schema.objective import Divergence
from specs.schema.training import Training


class Policy(nn.Module):
    """A model as the objective sees it: tokens in, logprobs and entropies of chosen tokens out, never full logits."""

    def __init__(
        self, model: PreTrainedModel, *, temperature: float, entropy_gradient: bool = False, balances: bool = False
    ) -> None:
        """Wraps the model. `entropy_gradient`, `balances`: whether entropies, and the probabilities in `routing`, are
        differentiable."""
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.entropy_gradient = entropy_gradient
        self.routing: Routing | None = None
        """Routing of the last pass; None if no routers of the model expose their choice."""
        self.routers: ReplayedRouters | None = None
        """Routers that replay the sampler's choice; None without replay."""
        self._routed_experts = routed_experts(model)
        self._balances = balances

    def forward(
        self,
        input_ids: Tensor,
        sources: Tensor,
        targets: Tensor,
        temperature: float | None = None,
        packing: Packing | None = None,
        experts: Tensor | None = None,
        own_logits: bool = False,
        describes: tuple[int, int] | None = None,
        compares: tuple[Divergence, ReferenceRows] | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Returns logprobs and entropies of `targets`, nats, float32. [n] each

        Args:
            input_ids: token ids, padded on the right [b, L], or packed [1, L].
            sources: positions in the flattened input ids whose hidden states predict the targets. [n]
            targets: token ids. [n]
            temperature: overrides the policy's own.
            packing: the sequences of a packed row; None if the rows are padded.
            experts: experts of each of the flattened input ids; None lets the routers choose. [b * L, layers, experts
                per token]
            own_logits: for a check: return logprobs from the model's own logits without noise, and instead of the
                entropies the rounding error of the largest logit, nats. []
            describes: return the fields of `ReferenceRows` instead of the entropies, for a later comparison. (k, v)
                requests the k most likely of the first v tokens, (0, v) the hidden states and the output head. (0, v)
                computes no logits and returns None instead of the logprobs.
            compares: return the fields of `StateDivergence` as well, the policy's divergence from these rows, and the
                logprobs of `targets` under the rows; None if these are of the most likely tokens.
        """
        if own_logits:
            return self._own_logprobs(input_ids, sources, targets)
        if self.routers:
            self.routers.give(experts)
        packed: dict[str, Any] = {"packing": packing, "position_ids": packing.position_ids} if packing else {}
        shown = {"output_router_logits": True} if self._routed_experts else {}
        outputs = self.model.base_model(input_ids=input_ids, use_cache=False, **shown, **packed)
        logits = getattr(outputs, "router_logits", None)
        if logits and not self._balances:  # otherwise each layer's probabilities would be kept until the next pass
            logits = tuple(each.detach() for each in logits)
        given = self.routers.given if self.routers else None
        self.routing = routing_of(logits, sources, self._routed_experts, given) if logits else None
        if not torch.is_grad_enabled():  # otherwise layers may be recomputed, with the same experts
            self.choose_experts()
        head: Any = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        chosen = outputs.last_hidden_state.flatten(0, 1).index_select(0, sources)
        heat, bias = self.temperature if temperature is None else temperature, getattr(head, "bias", None)
        if describes is not None:
            return self._described(chosen, head.weight, targets, *describes, temperature=heat, bias=bias)
        given_head: dict[str, Any] = {
            "temperature": heat,
            "bias": bias,
            "entropy_gradient": self.entropy_gradient,
        }
        if compares is not None:
            return self._compared(chosen, head.weight, targets, *compares, **given_head)
        return token_logprobs(chosen, head.weight, targets, **given_head)

    @staticmethod
    def _described(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        top_k: int,
        vocabulary: int,
        *,
        temperature: float,
        bias: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Returns logprobs, or None with hidden states, and the fields of `ReferenceRows`."""
        if top_k:
            logprobs, ids, likeliest = likeliest_tokens(
                hidden, weight, targets, top_k, temperature=temperature, bias=bias, vocabulary=vocabulary
            )
            return logprobs, likeliest, ids, None, None
        return None, hidden.detach(), None, weight.detach(), None if bias is None else bias.detach()

    @staticmethod
    def _compared(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        divergence: Divergence,
        rows: ReferenceRows,
        **head: Any,
    ) -> tuple[Tensor | None, ...]:
        """Returns logprobs, entropies, the fields of `StateDivergence`, and the reference's logprobs if it has all."""
        ref_logprobs = None
        if rows.weight is not None:
            compared = Compared(divergence, rows.values, rows.weight, rows.bias)
            logprobs, entropies, state, ref_logprobs = token_divergences(hidden, weight, targets, compared, **head)
        else:
            assert rows.ids is not None
            every, entropies = token_logprobs(hidden, weight, torch.cat([targets[:, None], rows.ids], 1), **head)
            outside = (rows.ids != targets[:, None]).all(1)
            logprobs, state = every[:, 0], over_tokens(divergence, every[:, 1:], rows.values, outside)
        return logprobs, entropies, state.value, state.reverse, state.forward, state.outside, ref_logprobs

    def _own_logprobs(self, input_ids: Tensor, sources: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        was_training = self.model.training
        self.model.eval()  # type: ignore[no-untyped-call]
        try:
            logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits.flatten(0, 1)[sources]
        finally:
            self.model.train(was_training)
        logprobs = logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        return logprobs, logits.float().abs().max() * torch.finfo(logits.dtype).eps

    def choose_experts(self) -> None:
        """Lets the routers choose experts themselves from the next pass on. This also affects a sampler that shares
        them."""
        if self.routers:
            self.routers.give(None)


def load_model(weights_dir: Path, training: Training) -> PreTrainedModel:
    """Returns the model in the training precision. Dropout is off, since the importance ratio compares two passes.

    For ZeRO 3 only rank 0 has the values, until `shard` distributes them.
    """
    config = config_of(weights_dir)
    check_logits(config)
    read = read_on_first_rank if training.zero_stage == 3 else model_of
    model: PreTrainedModel = read(weights_dir, config=config, dtype=getattr(torch, training.precision))
    model.train()
    switch_off_noise(model)
    if training.packing and model.config._attn_implementation == "sdpa":
        model.config._attn_implementation = ATTENTION
    if training.kernels == "liger":
        use_liger(model, keeps_products=training.gradient_checkpointing == "selective")
    if training.lora:
        add_adapters(model, training.lora)
    if training.gradient_checkpointing:
        recompute_activations(model, selective=training.gradient_checkpointing == "selective")
    return model


def frozen_model(weights_dir: Path, training: Training) -> PreTrainedModel:
    """Returns a model that is never trained, in the training precision."""
    frozen = training.model_copy(update={"lora": None, "gradient_checkpointing": False, "kernels": "torch"})
    return load_model(weights_dir, frozen).requires_grad_(False)


def attention_share(model: PreTrainedModel) -> float:
    """Returns the coefficient of n^2 (attention), relative to that of n (products with weights), in the number of
    operations for n tokens.

    A token costs 2 operations per weight. Half of all pairs see each other; each pair costs 4 operations per layer and
    element of a token's queries.
    """
    text = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0)
    queries = heads * (getattr(text, "head_dim", None) or text.hidden_size // max(1, heads))
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    looked_up = 0 if embedding.weight is head.weight else embedding.weight.numel()
    return float(text.num_hidden_layers * queries / (model.num_parameters() - looked_up))
