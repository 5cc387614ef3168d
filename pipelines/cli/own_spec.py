"""A spec about a user's own file of problems and model, for `rpg init --data`."""

import csv
import json
import os
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from specs.errors import Issue, SpecError

_PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "prompts")
_ANSWERS = ("answer", "reward_model.ground_truth", "ground_truth", "solution", "gold", "target", "label", "output")
_HELD_OUT = 100
_TEXT = """\
# `rpg plan experiment.yaml` shows what would run, `rpg run experiment.yaml` runs it.
name: {name}
question: Does training on {file} help?
seeds: [0]                   # one run each; three or more before you believe a difference

model: {{source: pretrained, path: {model}}}

data:
  train:
    - source: {source}
      path: {path}
      columns: {{prompt: {prompt}, answer: {answer}}}{others}
  evaluation:                # the first {held_out} problems; they leave the training set
    - name: held_out
      limit: {held_out}
      source: {source}
      path: {path}
      columns: {{prompt: {prompt}, answer: {answer}}}
  prompt: {asked}
  overlap: drop
  max_prompt_length: {longest}   # tokens; with the response it must fit the model's context

rollout:
  engine: transformers       # or vllm, on a GPU
  max_response_length: 256

reward: {{type: {reward}}}

objective:
  type: rpg                  # or a rival: ppo, grpo, dapo, dr_grpo, gspo, cispo, rloo, reinforce_plus_plus
  divergence: unnormalized_reverse
  estimator: reinforce
  kl_coef: 1e-4
  clip: {{type: dual, low: 0.2, high: 0.28}}

reference:
  source: snapshot
  update: {{every_steps: 16}}

training:
  steps: 100
  prompts_per_step: {prompts}
  group_size: 8
  minibatches: 2             # optimizer updates in a step; with 1 the clip can never fire
  optimizer: {{learning_rate: 1e-6}}

evaluation:
  samples_per_problem: 4
"""


def own_spec(data: Path, model: str, reward: str, directory: Path) -> str:
    """The text of a spec that lies in `directory`. SpecError where the file's columns do not say what is what."""
    from specs.extensions import variants
    from specs.schema.fields import nearest
    from specs.schema.reward import Reward

    known = sorted(variants(Reward))
    if reward.endswith(".py"):
        reward = f"python, path: {json.dumps(_beside(Path(reward), directory))}"
    elif reward not in known:
        raise SpecError(Issue("--reward: unknown reward", (), reward, ", ".join(known), nearest(reward, known)))
    source, rows = _read(data)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    prompt, answer = _column("prompt", _PROMPTS, columns, data), _column("answer", _ANSWERS, columns, data)
    others = [name for name in columns if name not in (prompt, answer)]
    longest = max((len(str(row.get(prompt, ""))) for row in rows), default=0)
    return _TEXT.format(
        name=re.sub(r"[^a-z0-9-]+", "-", data.stem.lower()).strip("-")[:63] or "own",
        file=data.name,
        model=json.dumps(_beside(Path(model), directory) if os.path.isdir(model) else model),
        source=source,
        path=json.dumps(_beside(data, directory)),
        prompt=json.dumps(prompt),
        answer=json.dumps(answer),
        others=f"  # others: {', '.join(others)}" if others else "",
        asked="{type: chat}" if _has_chat_template(model) else '{type: template, template: "{prompt}\\n"}',
        held_out=_HELD_OUT,
        longest=max(256, 2 ** (longest - 1).bit_length()) if longest < 8192 else 8192,
        reward=reward,
        prompts=8,
    )


def _read(data: Path) -> tuple[str, list[dict[str, Any]]]:
    """Kind of source that reads the file, and its first rows, columns inside structs with dots."""
    from rpg.data.columns import names

    kinds = {".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}
    kind = kinds.get(data.suffix.lower(), "")
    if not kind:
        raise _wrong("is of no known kind", data, ", ".join(kinds))
    if not data.is_file():
        raise _wrong("no such file", data)
    try:
        if kind == "csv":
            with data.open(encoding="utf-8-sig", newline="") as lines:
                rows: list[dict[str, Any]] = list(islice(csv.DictReader(lines), 50))
        elif kind == "jsonl":
            with data.open(encoding="utf-8-sig") as lines:
                rows = [json.loads(line) for line in islice(lines, 50) if line.strip()]
        else:
            import pyarrow.parquet as pq

            with pq.ParquetFile(data) as table:
                rows = next(table.iter_batches(50)).to_pylist()
        flat = [{name: row.get(name) for name in names(row)} for row in rows]
    except (OSError, ValueError, AttributeError, csv.Error, StopIteration) as error:
        raise _wrong(f"cannot be read as {kind}: {str(error)[:200]}", data) from None
    if not flat:
        raise _wrong("has no rows", data)
    return kind, flat


def _column(role: str, usual: Sequence[str], columns: Sequence[str], data: Path) -> str:
    """The column that holds the prompts or the answers, by the names that it usually has."""
    by_name = {column.lower(): column for column in columns}
    if found := next((by_name[name] for name in usual if name in by_name), ""):
        return found
    hint = f"rename the column with the {role}s to `{role}`, or write `columns: {{{role}: ...}}` into the spec by hand"
    raise SpecError(Issue(f"no column is known to hold the {role}s", (), ", ".join(columns), "", hint, str(data)))


def _beside(path: Path, directory: Path) -> str:
    """The path as a spec in the directory names it."""
    relative = os.path.relpath(path, directory)
    return relative if relative.startswith(".") else f"./{relative}"


def _has_chat_template(model: str) -> bool:
    if not os.path.isdir(model):
        return False
    config = Path(model) / "tokenizer_config.json"
    in_config = config.is_file() and "chat_template" in config.read_text()
    return in_config or (Path(model) / "chat_template.jinja").is_file()


def _wrong(message: str, data: Path, allowed: str = "") -> SpecError:
    return SpecError(Issue(message, (), "", allowed, "", str(data)))
