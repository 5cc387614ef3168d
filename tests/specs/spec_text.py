"""A small spec that is right, for tests to break."""

from pathlib import Path

from specs.errors import SpecError, render
from specs.loader import load_any

GOOD = """\
name: small
model:
  source: scratch
  config: {hidden_size: 32, max_position_embeddings: 64}
data:
  train:
    - {source: reasoning_gym, task: chain_sum, size: 100}
  evaluation:
    - {name: held_out, source: reasoning_gym, task: chain_sum, size: 50, seed: 1000}
  max_prompt_length: 32
rollout: {max_response_length: 32}
reward: {type: exact_match}
objective:
  type: rpg
  kl_coef: 1e-2
  clip:
    type: dual
    low: 0.2
training:
  steps: 4
  prompts_per_step: 4
  group_size: 4
  minibatches: 2
"""


def write(text: str | bytes, name: str = "spec.yaml") -> Path:
    """A file in the working directory."""
    path = Path(name)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def changed(old: str, new: str) -> str:
    """The good spec with one part replaced."""
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


def message(text: str | bytes, *overrides: str) -> str:
    """Returns the error message of an invalid spec."""
    try:
        load_any(write(text), overrides)
    except SpecError as error:
        return render(error.issues)
    raise AssertionError("nothing was found wrong")


def warnings(text: str) -> str:
    """Returns the warnings of a spec."""
    return render(load_any(write(text)).warnings, noun="warning")
