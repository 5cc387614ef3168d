"""A spec for a user's own problem file and model, for `rpg init --data`."""

import ast
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from specs.documents.strict_json import parse_json
from specs.errors import Issue, SpecError
from specs.machine.foreign.limited import limited_memory
from specs.machine.foreign.tables import allowed_memory, lines_of, require_parquet

_PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "prompts")
_ANSWERS = ("answer", "reward_model.ground_truth", "ground_truth", "solution", "gold", "target", "label", "output")
_HELD_OUT = 100
"""Number of held-out problems; half of a small file."""
_READ = 5000
"""Number of the file's rows that are read."""
_TEXT = """\
# `rpg plan experiment.yaml` shows what would run, `rpg run experiment.yaml` runs it.
name: {name}
question: Does training on {file} help?
seeds: [0]                   # one run each; three or more before you believe a difference

{model}
data:
  train:
    - source: {source}
      path: {path}{delimiter}
      columns: {{prompt: {prompt}, answer: {answer}}}{others}
  evaluation:                # the first {held_out} problems; they leave the training set
    - name: held_out
      limit: {held_out}
      source: {source}
      path: {path}{delimiter}
      columns: {{prompt: {prompt}, answer: {answer}}}
  prompt: {asked}
  overlap: drop
  max_prompt_length: {longest}   # tokens; with the response it must fit the model's context

rollout:
  engine: transformers       # or vllm, on a GPU
  max_response_length: {response}

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
  optimizer: {{learning_rate: {rate}}}

evaluation:
  samples_per_problem: 4
"""
_PRETRAINED = """\
model: {{source: pretrained, path: {path}}}
"""
_SCRATCH = """\
model:                       # made on the spot; or: {{source: pretrained, path: Qwen/Qwen3-0.6B-Base}}
  source: scratch
  model_type: qwen3
  config: {{hidden_size: 128, intermediate_size: 384, num_hidden_layers: 4, num_attention_heads: 4, head_dim: 32,
           num_key_value_heads: 2, max_position_embeddings: {context}, tie_word_embeddings: true}}
  tokenizer: {{type: bytes}}

warm_up:                     # supervised steps first: a model that never answers right learns nothing
  steps: 300
  learning_rate: 2e-3
"""


def own_spec(data: Path, model: str, reward: str, directory: Path, *, prompt: str = "", answer: str = "") -> str:
    """The text of a spec that lies in `directory`.

    Args:
        prompt: the column with the prompts; empty: found by its usual name.
        answer: the column with the answers; empty: found by its usual name.
        model: a directory or a Hub id; empty: a small one that is made on the spot.
        reward: a reward's name, or a Python file with one.
    Raises:
        SpecError: the file's column names are ambiguous, or there is no such reward or model directory.
    """
    from specs.extensions import variants
    from specs.schema.fields import nearest
    from specs.schema.reward import Reward

    known = sorted(variants(Reward))
    if reward.endswith(".py"):
        reward = f"python, path: {json.dumps(_beside(Path(reward), directory))}{_function(Path(reward))}"
    elif reward not in known:
        raise SpecError(Issue("--reward: unknown reward", (), reward, ", ".join(known), nearest(reward, known)))
    source, delimiter, rows = _read(data)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    prompt = _column("prompt", _PROMPTS, columns, data, prompt)
    answer = _column("answer", _ANSWERS, columns, data, answer)
    others = [name for name in columns if name not in (prompt, answer)]
    if not os.path.isdir(model) and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise SpecError(Issue("--model: no such directory", (), model, "a directory, or a Hub id"))
    longest = _power_of_two(rows, prompt, least=256 if model else 16, most=8192)
    response = 256 if model else _power_of_two(rows, answer, least=8, most=256)
    if model:
        path = json.dumps(_beside(Path(model), directory) if os.path.isdir(model) else model)
        model_section = _PRETRAINED.format(path=path)
    else:
        model_section = _SCRATCH.format(context=longest + response)
    return _TEXT.format(
        name=re.sub(r"[^a-z0-9-]+", "-", data.stem.lower()).strip("-")[:63] or "own",
        file=data.name,
        model=model_section,
        source=source,
        path=json.dumps(_beside(data, directory)),
        delimiter=f"\n      delimiter: {json.dumps(delimiter)}" if delimiter != "," else "",
        prompt=json.dumps(prompt),
        answer=json.dumps(answer),
        others=f"  # others: {', '.join(others)}" if others else "",
        asked="{type: chat}" if _has_chat_template(model) else '{type: template, template: "{prompt}\\n"}',
        held_out=max(1, min(_HELD_OUT, len(rows) // 2)),
        longest=longest,
        response=response,
        reward=reward,
        prompts=8,
        rate="1e-6" if model else "1e-4",
    )


def _power_of_two(rows: Sequence[dict[str, Any]], column: str, *, least: int, most: int) -> int:
    """Returns the tokens that a column's texts in these rows need, with one for each byte and one at the end, as a
    power of two within bounds."""
    longest = max((len(str(row.get(column, "")).encode()) for row in rows), default=0) + 1
    return min(max(least, 1 << longest.bit_length()), most)


def _function(reward: Path) -> str:
    """Returns the spec's entry for a reward file's function, if that is not `score`."""
    try:
        tree = ast.parse(reward.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(f"cannot be read: {error.strerror}", reward) from None
    except (SyntaxError, ValueError) as error:
        raise _wrong(f"is no Python: {getattr(error, 'msg', error)}", reward) from None
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    if "score" in names:
        return ""
    if len(names) != 1:
        raise _wrong("has no function `score`", reward, ", ".join(names))
    return f", function: {names[0]}"


def _read(data: Path) -> tuple[str, str, list[dict[str, Any]]]:
    """Kind of source that reads the file, its delimiter, and its first rows, columns inside structs with dots."""
    from rpg.data.columns import names
    from rpg.data.sources.csv import delimiter_of, rows_of

    delimiter = ","
    kinds = {".jsonl": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
    kind = kinds.get(data.suffix.lower(), "")
    if not kind:
        raise _wrong("is of no known kind", data, ", ".join(kinds))
    if not data.is_file():
        raise _wrong("no such file", data)
    try:
        if kind == "csv":
            delimiter = delimiter_of(data)
            rows: list[dict[str, Any]] = [row for _, row in islice(rows_of(data, delimiter), _READ)]
        elif kind == "jsonl":
            with data.open(encoding="utf-8-sig") as lines:
                rows = [parse_json(line) for line in islice(lines_of(lines), _READ) if line.strip()]
        else:
            import pyarrow.parquet as pq

            size = data.stat().st_size
            with limited_memory(allowed_memory(size)), pq.ParquetFile(data) as table:
                require_parquet(size, table.metadata)
                rows = next(table.iter_batches(_READ)).to_pylist()
        flat = [{name: row.get(name) for name in names(row)} for row in rows]
    except SpecError as error:
        raise SpecError(*(replace(issue, path=(), file=str(data)) for issue in error.issues)) from None
    except (OSError, ValueError, MemoryError, RecursionError, AttributeError, StopIteration) as error:
        raise _wrong(f"cannot be read as {kind}: {str(error)[:200]}", data) from None
    if not flat:
        raise _wrong("has no rows", data)
    return kind, delimiter, flat


def _column(role: str, usual: Sequence[str], columns: Sequence[str], data: Path, given: str) -> str:
    """The column that holds the prompts or the answers: the one given, else by the names that it usually has."""
    from specs.schema.fields import nearest

    if given:
        if given in columns:
            return given
        raise SpecError(
            Issue(f"--{role}: no such column", (), given, ", ".join(columns), nearest(given, columns), str(data))
        )
    by_name = {column.lower(): column for column in columns}
    if found := next((by_name[name] for name in usual if name in by_name), ""):
        return found
    hint = f"say which: `--{role} COLUMN`"
    raise SpecError(Issue(f"no column is known to hold the {role}s", (), ", ".join(columns), "", hint, str(data)))


def _beside(path: Path, directory: Path) -> str:
    """Returns the path as a spec in the directory names it."""
    relative = os.path.relpath(path, directory)
    return relative if relative.startswith(".") else f"./{relative}"


def _has_chat_template(model: str) -> bool:
    if not os.path.isdir(model):
        return False
    config = Path(model) / "tokenizer_config.json"
    in_config = config.is_file() and "chat_template" in config.read_text(encoding="utf-8")
    return in_config or (Path(model) / "chat_template.jinja").is_file()


def _wrong(message: str, data: Path, allowed: str = "") -> SpecError:
    return SpecError(Issue(message, (), "", allowed, "", str(data)))
