"""A rank's checks of the spec before it trains."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from rpg import components
from specs.errors import SpecError
from specs.loader import load_experiment

SPEC = """\
name: by-hand
model: {source: scratch, config: {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}}
data: {train: [{source: reasoning_gym, task: chain_sum, size: 50, seed: 1}]}
reward: {type: exact_match}
objective: {type: rpg, kl_coef: 1.0e-2}
training: {steps: 2, prompts_per_step: 4, group_size: 2, minibatches: 2}
"""


def test_more_ranks_than_prompts_are_refused_however_they_were_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spec says one rank, which a launcher of ranks started by hand does not read."""
    (tmp_path / "spec.yaml").write_text(SPEC)
    LlamaConfig().save_pretrained(tmp_path)
    spec = load_experiment(tmp_path / "spec.yaml")
    monkeypatch.setattr(components.ranks, "world_size", lambda: 4)
    components._check(spec, tmp_path, 64)
    monkeypatch.setattr(components.ranks, "world_size", lambda: 8)
    with pytest.raises(SpecError, match="more ranks were started than a step has prompts"):
        components._check(spec, tmp_path, 64)
