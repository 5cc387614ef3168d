"""A spec for a user's own problem file and model, for `rpg init --data`."""

import ast
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specs.errors import Issue, SpecError
from specs.machine.foreign.limited import limited_memory
from specs.machine.foreign.tables import allowed_memory, require_parquet

if TYPE_CHECKING:
    from rpg.rewards.functions.python import Arguments

_PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "prompts")
_ANSWERS = ("answer", "reward_model.ground_truth", "ground_truth", "solution", "gold", "target", "label", "output")
_HELD_OUT = 100
"""Number of held-out problems. A small file has half of its problems held out."""
_READ = 5000
"""Number of the file's rows that are read."""
_TOKENIZED = 200
"""Number of the longest texts that are tokenized."""
_RESPONSE, _LONGEST_RESPONSE = 256, 2048
"""Least and most tokens of a response. The limit is four times the longest answer's tokens, within these bounds."""
_LEAST_RESPONSE = 16
"""Tokens of a response if the prompts need nearly the whole context."""
_LONGEST_CONTEXT = 8192
"""Tokens of the context if the model does not state its length."""
_HELD_OUT_PARTS = ("test", "validation", "valid", "dev", "eval")
"""Parts of a dataset to evaluate on. The first that exists is used."""
_TEXT = """\
# `rpg plan experiment.yaml` shows what would run, `rpg run experiment.yaml` runs it.
name: {name}
question: Does training on {file} help?
seeds: [0]                   # one run each; three or more before you believe a difference

{model}
data:
  train:
    - source: {source}
      path: {path}{more}
      columns: {columns}{others}
  evaluation:                # {evaluated}
    - name: held_out
      limit: {held_out}
      source: {source}
      path: {path}{held_more}
      columns: {columns}
  prompt: {asked}
  overlap: drop
  max_prompt_length: {longest}   # tokens, {measured}; with the response it must fit the model's context

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


@dataclass(frozen=True, slots=True)
class _Table:
    """The first rows of a user's problems, and the spec's entries for them."""

    source: str
    """Kind of source."""
    rows: list[dict[str, Any]]
    """Column -> value; columns inside structs have dotted names."""
    more: str = ""
    """Further entries of the training set, one per line."""
    held_out: str = ""
    """Further entries of the evaluation set, if they differ from the training set's."""

    @property
    def columns(self) -> list[str]:
        """Names of all columns."""
        return list(dict.fromkeys(name for row in self.rows for name in row))


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Lengths in tokens."""

    prompt: int
    response: int
    measured: str
    """How the lengths were found, for a comment in the spec."""


def own_spec(
    data: Path, model: str, reward: str, directory: Path, *, prompt: str = "", answer: str = "", split: str = ""
) -> str:
    """Returns the text of a spec that will be in `directory`.

    Args:
        data: a file, or a dataset of the Hub: a directory or an id.
        prompt: the column with the prompts; by default one with a usual name.
        answer: the column with the answers; by default one with a usual name.
        split: the part of a dataset to train on; by default train.
        model: a directory or a Hub id; empty: a small one that is made on the spot.
        reward: a reward's name, or a Python file with one, `FILE.py` or `FILE.py:FUNCTION`.
    Raises:
        SpecError: the file's column names are ambiguous, or there is no such reward or model directory.
    """
    reward, arguments = _reward(reward, directory)
    table = _read(data, split)
    columns = table.columns
    prompt = _column("prompt", _PROMPTS, columns, data, prompt)
    answer = _column("answer", _ANSWERS, columns, data, answer)
    if unknown := arguments.missing(columns):
        allowed, hint = ", ".join(columns), "name the parameter like its column; the gold answer is also in `answer`"
        message = "--reward: no column provides this parameter of the function"
        raise SpecError(Issue(message, (), unknown[0], allowed, hint, str(data)))
    keep = [name for name in arguments.named if name in columns and name not in arguments.given]
    others = [name for name in columns if name not in (prompt, answer, *keep)]
    if not os.path.isdir(model) and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise SpecError(Issue("--model: no such directory", (), model, "a directory, or a Hub id"))
    tokenizer, context = _tokenizer(model) if model else (None, 0)
    chat = bool(tokenizer and tokenizer.chat_template)
    lengths = _lengths(table.rows, prompt, answer, tokenizer, context, is_scratch=not model)
    if model:
        path = json.dumps(_beside(Path(model), directory) if os.path.isdir(model) else model)
        model_section = _PRETRAINED.format(path=path)
    else:
        model_section = _SCRATCH.format(context=lengths.prompt + lengths.response)
    kept = f", keep: {json.dumps(keep)}" if keep else ""
    return _TEXT.format(
        name=re.sub(r"[^a-z0-9-]+", "-", data.stem.lower()).strip("-")[:63] or "own",
        file=data.name,
        model=model_section,
        source=table.source,
        path=json.dumps(_beside(data, directory) if data.exists() else str(data)),
        more=table.more,
        held_more=table.held_out or table.more,
        held_out=_HELD_OUT if table.held_out else max(1, min(_HELD_OUT, _num_problems(table.rows, prompt) // 2)),
        evaluated=(
            "problems of another part of the dataset"
            if table.held_out
            else "the first problems, which are removed from the training set"
        ),
        columns=f"{{prompt: {json.dumps(prompt)}, answer: {json.dumps(answer)}{kept}}}",
        others=f"  # others: {', '.join(others)}" if others else "",
        asked="{type: chat}" if chat else '{type: template, template: "{prompt}\\n"}',
        longest=lengths.prompt,
        measured=lengths.measured,
        response=lengths.response,
        reward=reward,
        prompts=8,
        rate="1e-6" if model else "1e-4",
    )


def _num_problems(rows: Sequence[dict[str, Any]], prompt: str) -> int:
    """Returns the number of different problems in the rows."""
    from rpg.data.problems import content_id

    return len({content_id(_text(row.get(prompt))) for row in rows})


def _text(value: Any) -> str:
    """Returns the text of a cell; the contents if the cell has messages."""
    if isinstance(value, list):
        return "\n\n".join(str(each.get("content", "")) for each in value if isinstance(each, dict))
    return str(value)


def _lengths(
    rows: Sequence[dict[str, Any]], prompt: str, answer: str, tokenizer: Any, context: int, *, is_scratch: bool
) -> _Lengths:
    """Returns the lengths that prompts and responses need.

    Args:
        tokenizer: the model's; None if it is not on this machine, or if the model is made on the spot. Each byte then
            counts as a token.
        context: the model's.
        is_scratch: whether the model is made on the spot.
    """
    prompts = _longest([row.get(prompt) for row in rows])
    answers = [_text(each) for each in _longest([row.get(answer) for row in rows])]
    if is_scratch:
        of_prompt = _power_of_two(max(len(_text(each).encode()) for each in prompts), least=16, most=8192)
        of_answer = _power_of_two(max(len(each.encode()) for each in answers), least=8, most=256)
        return _Lengths(of_prompt, of_answer, "one token for each byte")
    if tokenizer is None:
        longest = max(len(_text(each).encode()) for each in prompts)
        return _Lengths(_power_of_two(longest, least=256, most=8192), _RESPONSE, "estimated, one for each byte")
    texts = _rendered(tokenizer, prompts) if tokenizer.chat_template else [f"{_text(each)}\n" for each in prompts]
    of_prompt, of_answer = (max(map(len, tokenizer(each)["input_ids"])) for each in (texts, answers))
    longest = _power_of_two(of_prompt, least=32, most=max(context // 2, min(of_prompt, context - _LEAST_RESPONSE)))
    response = _power_of_two(4 * of_answer, least=_RESPONSE, most=_LONGEST_RESPONSE)
    return _Lengths(longest, min(response, context - longest), f"the longest that was read has {of_prompt}")


def _longest(values: Sequence[Any]) -> list[Any]:
    """Returns the values with the longest texts, among them the one with the most tokens."""
    return sorted(values, key=lambda value: len(_text(value)))[-_TOKENIZED:]


def _tokenizer(model: str) -> tuple[Any, int]:
    """Returns a model's tokenizer and context; no tokenizer if it is not on this machine."""
    from rpg.base.stage import look_at
    from rpg.pretrained import context_of
    from specs.schema.model import PretrainedModel

    try:
        found = look_at(PretrainedModel(source="pretrained", path=model), build=False)
    except SpecError:  # `rpg validate --deep` reports the cause
        return None, 0
    return found.tokenizer, (found.config and context_of(found.config)) or _LONGEST_CONTEXT


def _rendered(tokenizer: Any, prompts: Sequence[Any]) -> list[str]:
    """Returns prompts as the model's chat template renders them, or as plain text if the template fails. `rpg validate
    --deep` reports that failure."""
    from rpg.data.chat_template import TemplateError, render_all

    chats = [each if isinstance(each, list) else [{"role": "user", "content": str(each)}] for each in prompts]
    try:
        return render_all(tokenizer, [json.dumps(chat) for chat in chats])
    except TemplateError:
        return list(map(_text, prompts))


def _power_of_two(tokens: int, *, least: int, most: int) -> int:
    """Returns a power of two, within bounds, that is larger than the number of tokens and one more for the end."""
    return min(max(least, 1 << (tokens + 1).bit_length()), most)


def _reward(named: str, directory: Path) -> "tuple[str, Arguments]":
    """Returns a reward's entry in the spec and its function's arguments. Raises SpecError if it cannot be found."""
    from rpg.rewards.functions.python import Arguments, arguments_of
    from specs.extensions import variants
    from specs.schema.fields import nearest
    from specs.schema.reward import Reward

    file, _, function = named.partition(".py:") if ".py:" in named else (named.removesuffix(".py"), "", "")
    if not (named.endswith(".py") or function):
        known = sorted(variants(Reward))
        if named not in known:
            raise SpecError(Issue("--reward: unknown reward", (), named, ", ".join(known), nearest(named, known)))
        return named, Arguments((), ())
    path = Path(f"{file}.py")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(f"cannot be read: {error.strerror}", path) from None
    except (SyntaxError, ValueError) as error:
        raise _wrong(f"is not valid Python: {getattr(error, 'msg', error)}", path) from None
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    function = function or ("score" if "score" in names or len(names) != 1 else names[0])
    if function not in names:
        hint = f"name one, for example `--reward {path}:{names[0]}`" if names else ""
        raise SpecError(Issue(f"has no function `{function}`", (), "", ", ".join(names), hint, str(path)))
    entry = f"python, path: {json.dumps(_beside(path, directory))}"
    entry += f", function: {function}" if function != "score" else ""
    return entry, arguments_of(tree, function)


def _read(data: Path, split: str) -> _Table:
    """Returns the first rows of a file or a dataset. Raises SpecError if they cannot be read."""
    from rpg.data.columns import cell, names
    from rpg.data.sources import jsonl
    from rpg.data.sources.csv import delimiter_of, rows_of

    kinds = {".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
    kind = "hub" if data.is_dir() else kinds.get(data.suffix.lower(), "")
    if not kind and not data.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(data)):
        kind = "hub"
    if not kind:
        raise _wrong("has an unknown file suffix", data, f"{', '.join(kinds)}, or a dataset's directory or Hub id")
    if kind != "hub" and not data.is_file():
        raise _wrong("no such file", data)
    more = held_out = ""
    try:
        if kind == "csv":
            delimiter = delimiter_of(data)
            rows: list[dict[str, Any]] = [row for _, row in islice(rows_of(data, delimiter), _READ)]
            more = f"\n      delimiter: {json.dumps(delimiter)}" if delimiter != "," else ""
        elif kind == "jsonl":
            rows = [row for _, row in islice(jsonl.rows_of(data), _READ)]
        elif kind == "hub":
            rows, more, held_out = _of_hub(str(data), split)
        else:
            import pyarrow.parquet as pq

            size = data.stat().st_size
            with limited_memory(allowed_memory(size)), pq.ParquetFile(data) as table:
                require_parquet(size, table.metadata)
                rows = next(table.iter_batches(_READ)).to_pylist()
        flat = [{name: cell(row, name) for name in names(row)} for row in rows]
    except SpecError as error:
        raise SpecError(*(replace(issue, path=(), file=str(data)) for issue in error.issues)) from None
    except (OSError, ValueError, MemoryError, RecursionError, AttributeError, StopIteration) as error:
        raise _wrong(f"cannot be read as {kind}: {str(error)[:200]}", data) from None
    if not flat:
        raise _wrong("has no rows", data)
    return _Table(kind, flat, more, held_out)


def _of_hub(path: str, split: str) -> tuple[list[dict[str, Any]], str, str]:
    """Returns the first rows of a dataset, and the entries that name the part to train on and the part to evaluate on,
    if any."""
    from rpg.data.sources.hub import HubSource

    splits = HubSource(source="hub", path=path).splits()
    if split and split not in splits:
        raise SpecError(Issue("--split: no such part", (), split, ", ".join(splits)))
    if not split and "train" not in splits and len(splits) > 1:
        hint = "name the part to train on with `--split NAME`"
        raise SpecError(Issue("the dataset has no part `train`", (), ", ".join(splits), "", hint))
    chosen = split or ("train" if "train" in splits else splits[0])
    entries = "\n      split: {}"
    more = entries.format(json.dumps(chosen)) if chosen != "train" else ""
    held_out = next((name for name in _HELD_OUT_PARTS if name in splits and name != chosen), "")
    rows = HubSource(source="hub", path=path, split=chosen).rows(_READ)
    return rows, more, entries.format(json.dumps(held_out)) if held_out else ""


def _column(role: str, usual: Sequence[str], columns: Sequence[str], data: Path, given: str) -> str:
    """Returns the column with the prompts or the answers: the given one, else the first with a usual name."""
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
    hint = f"name the column with `--{role} COLUMN`"
    raise SpecError(Issue(f"cannot tell which column holds the {role}s", (), ", ".join(columns), "", hint, str(data)))


def _beside(path: Path, directory: Path) -> str:
    """Returns the path as a spec in the directory would write it."""
    relative = os.path.relpath(path, directory)
    return relative if relative.startswith(".") else f"./{relative}"


def _wrong(message: str, data: Path, allowed: str = "") -> SpecError:
    return SpecError(Issue(message, (), "", allowed, "", str(data)))
