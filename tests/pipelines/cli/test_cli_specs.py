"""`rpg validate`, `rpg schema` and `rpg init` as a user meets them."""

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import Qwen3Config

import specs
from pipelines.cli import main, verbs, words
from pipelines.cli.verbs.resume import _document_of_all
from pipelines.home.home import Home
from pipelines.jobs.preflight import _note_of_look
from pipelines.planning.plan import make_plan
from pipelines.running.run import register_experiment, register_runs
from rpg import preflight
from rpg.base.tokenization import make_tokenizer
from rpg.preflight import Findings
from specs.loader import load_document
from specs.schema.experiment import Experiment
from specs.schema.model import ByteTokenizer

STARTER_FILE = Path(specs.__file__).parent / "experiments" / "starter.yaml"
STARTER = STARTER_FILE.read_text("utf-8")


@pytest.fixture
def rpg(tmp_path, monkeypatch, capsys):
    """Calls the command line in an empty directory: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rpg", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr()
        return int(end.value.code or 0), shown.out, shown.err

    return call


def test_a_good_file_is_described_and_exits_0(rpg):
    Path("a.yaml").write_text(STARTER)
    assert rpg("validate", "a.yaml") == (0, "a.yaml: experiment starter: 1 run (1 seed)\n", "")


def test_settings_are_validated_like_the_file(rpg):
    Path("a.yaml").write_text(STARTER)
    setting = "matrix.product.objective.kl_coef=[1e-2, 1e-1]"
    code, out, _ = rpg("validate", "a.yaml", "--set", setting, "--set", "seeds=[0,1,2]")
    assert (code, out) == (0, "a.yaml: experiment starter: 6 runs (2 cells x 3 seeds)\n")
    assert rpg("validate", "a.yaml", "--set", "training.stepz=1")[0] == 2


def test_what_is_wrong_goes_to_stderr_and_exits_2(rpg):
    Path("a.yaml").write_text(STARTER)
    Path("b.yaml").write_text(STARTER.replace("steps: 1500                # at most", "steps: none"))
    code, out, err = rpg("validate", "a.yaml", "b.yaml", "c.yaml")
    assert code == 2
    assert out == "a.yaml: experiment starter: 1 run (1 seed)\n"
    line = STARTER.splitlines().index("  steps: 1500                # at most") + 1
    assert err == (
        f"b.yaml:{line}: warm_up.steps: must be a whole number\n"
        f"    {line} |   steps: none\n"
        '  given: "none"    allowed: a whole number, at least 1\n'
        "  hint: Largest number of optimizer updates.\n"
        "c.yaml: no such file\n"
        "2 errors; nothing was run\n"
    )


def test_warnings_leave_the_exit_code_alone(rpg):
    Path("a.yaml").write_text(STARTER)
    code, _, err = rpg("validate", "a.yaml", "--set", "training.minibatches=1")
    assert code == 0
    assert "objective.clip: the clip can never fire" in err
    assert err.endswith("1 warning\n")


def test_json_says_the_same_to_programs(rpg):
    Path("a.yaml").write_text(STARTER)
    Path("b.yaml").write_text("name: b\n")
    code, out, _ = rpg("validate", "a.yaml", "b.yaml", "--json")
    good, bad = json.loads(out)
    assert code == 2
    assert (good["valid"], good["kind"], good["runs"], good["seeds"], good["problems"]) == (
        True,
        "experiment",
        1,
        [0],
        [],
    )
    assert not bad["valid"]
    assert {tuple(problem["path"]) for problem in bad["problems"]} >= {("model",), ("data",), ("training",)}


def test_a_study_is_known_by_its_content(rpg):
    Path("a.yaml").write_text(STARTER)
    Path("s.yaml").write_text(
        "name: s\nexperiment: a.yaml\nparameters: {objective.clip.low: {float: [0.1, 0.3]}}\n"
        "goal: {dataset: held_out, metric: mean@8}\ntrials: 16\n"
    )
    said = "s.yaml: study s: 16 trials of starter over objective.clip.low\n"
    assert rpg("validate", "s.yaml") == (0, said, "")


def test_schema_prints_json_schema(rpg):
    for kind in ("experiment", "study"):
        code, out, _ = rpg("schema", kind)
        assert code == 0
        assert json.loads(out)["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_the_starter_satisfies_the_published_schema(rpg, tmp_path):
    _, out, _ = rpg("schema")
    Path("schema.json").write_text(out)
    Path("a.yaml").write_text(STARTER)
    check = [sys.executable, "-m", "check_jsonschema", "--schemafile", "schema.json", "a.yaml"]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_init_writes_a_spec_that_is_valid_and_overwrites_nothing(rpg):
    assert rpg("init", "new") == (
        0,
        "wrote new/experiment.yaml\nwrote new/experiment.schema.json\nwrote new/.gitignore\n"
        "next: cd new && rpg run experiment.yaml\n",
        "",
    )
    assert Path("new/.gitignore").read_text().splitlines()[-1] == ".rpg/"
    assert rpg("validate", "new/experiment.yaml")[0] == 0
    Path("new/experiment.yaml").write_text("mine")
    Path("new/.gitignore").unlink()
    kept = "kept  new/experiment.yaml, which exists\nkept  new/experiment.schema.json, which exists\n"
    assert rpg("init", "new")[:2] == (0, f"{kept}wrote new/.gitignore\n")
    assert Path("new/experiment.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sums.csv", 'question,answer,level\n"1 + 1, please",2,a\n2 + 2,4,b\n'),
        ("sums.jsonl", '{"Problem": "1 + 1", "solution": "2"}\n'),
    ],
)
def test_init_writes_a_spec_about_ones_own_file_and_model(rpg, name, text):
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "qwen3"}')
    Path(name).write_text(text)
    code, out, err = rpg("init", "own", "--data", name, "--model", "model")
    assert (code, err) == (0, "")
    assert out.endswith("next: cd own && rpg run experiment.yaml\n")
    assert rpg("validate", "own/experiment.yaml")[1] == "own/experiment.yaml: experiment sums: 1 run (1 seed)\n"
    assert Path("own/experiment.yaml").read_text().startswith("# yaml-language-server: $schema=experiment.schema.json")


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("pandas.csv", ",question,answer\n0,1 + 1,2\n1,2 + 2,4\n", ()),
        ("excel.csv", "\ufeffquestion;answer\n1 + 1, please;2\n2 + 2;4\n", ()),
        ("trailing.csv", "question,answer,\n1 + 1,2,\n2 + 2,4,\n", ()),
        ("trailing-values.csv", "question,answer\n1 + 1,2,\n2 + 2,4,\n", ()),
        ("sums.tsv", "question\tanswer\n1 + 1\t2\n2 + 2\t4\n", ()),
        ("mine.csv", "frage;loesung\n1 + 1;2\n2 + 2;4\n", ("--prompt", "frage", "--answer", "loesung")),
    ],
)
def test_init_reads_csv_as_pandas_and_spreadsheets_write_it(rpg, name, text, options):
    Path(name).write_text(text)
    assert rpg("init", "own", "--data", name, *options)[::2] == (0, "")
    assert rpg("validate", "--deep", "own/experiment.yaml")[::2] == (0, "")


@pytest.mark.parametrize(
    "text",
    [
        '[{"question": "1 + 1", "answer": "2"}, {"question": "2 + 2", "answer": "4"}]',
        '\ufeff\n[\n  {"question": "1 + 1", "answer": "2"},\n  {"question": "2 + 2", "answer": "4"}\n]\n',
        '{"question": "1 + 1", "answer": "2"}\n{"question": "2 + 2", "answer": "4"}\n',
    ],
)
def test_init_reads_json_with_an_array_or_with_lines(rpg, text):
    Path("sums.json").write_text(text)
    assert rpg("init", "own", "--data", "sums.json")[::2] == (0, "")
    assert rpg("validate", "--deep", "own/experiment.yaml")[::2] == (0, "")


def test_init_keeps_the_columns_that_a_reward_function_takes_and_counts_each_problem_once(rpg):
    Path("sums.csv").write_text("question,answer,level,note\n" + "1 + 1,2,a,\n" * 50 + "2 + 2,4,b,\n3 + 3,6,c,\n")
    Path("reward.py").write_text(
        "def graded(completions, answer, level, scale=1.0, **others): ...\ndef other(response, depth): ...\n"
    )
    assert rpg("init", "own", "--data", "sums.csv", "--reward", "reward.py:graded")[::2] == (0, "")
    text = Path("own/experiment.yaml").read_text()
    assert text.count('columns: {prompt: "question", answer: "answer", keep: ["level"]}') == 2
    assert "  # others: note\n" in text
    assert "limit: 1\n" in text, "half of three problems"
    assert rpg("validate", "--deep", "own/experiment.yaml")[::2] == (0, "")
    code, _, err = rpg("init", "no", "--data", "sums.csv", "--reward", "reward.py:other")
    assert (code, err.splitlines()[:2]) == (
        2,
        [
            "sums.csv: --reward: no column provides this parameter of the function",
            "  given: depth    allowed: question, answer, level, note",
        ],
    )


@pytest.mark.more
def test_init_takes_lengths_from_the_models_tokenizer_and_context(rpg):
    Path("sums.csv").write_text(f"question,answer\n{'1 + ' * 15}1,16\n2 + 2,4\n")
    Qwen3Config(max_position_embeddings=96).save_pretrained("model")
    make_tokenizer(ByteTokenizer(), ()).save_pretrained("model")
    Path("model/model.safetensors").touch()
    assert rpg("init", "own", "--data", "sums.csv", "--model", "model")[::2] == (0, "")
    text = Path("own/experiment.yaml").read_text()
    assert "max_prompt_length: 62   # tokens, the longest that was read has 62;" in text
    assert "max_response_length: 34\n" in text


@pytest.mark.more
def test_init_reads_a_dataset_with_parts(rpg):
    rows = [json.dumps({"question": f"{n} + 1", "answer": n + 1}) for n in range(4)]
    for name, lines in (("train", rows[:2]), ("test", rows[2:])):
        Path("sums").mkdir(exist_ok=True)
        Path(f"sums/{name}.jsonl").write_text("\n".join(lines))
    assert rpg("init", "own", "--data", "sums")[::2] == (0, "")
    text = Path("own/experiment.yaml").read_text()
    assert 'source: hub\n      path: "../sums"\n      split: "test"\n' in text
    assert text.count("split:") == 1
    assert rpg("validate", "--deep", "own/experiment.yaml")[::2] == (0, "")
    assert rpg("init", "no", "--data", "sums", "--split", "dev")[2].startswith(
        "sums: --split: no such part\n  given: dev    allowed: "
    )
    Path("sums/train.jsonl").rename("sums/validation.jsonl")
    assert rpg("init", "no", "--data", "sums")[2].endswith(
        "hint: name the part to train on with `--split NAME`\n1 error; nothing was run\n"
    )


@pytest.mark.parametrize("verb", ["validate", "plan"])
def test_a_reward_function_without_its_columns_is_refused_with_the_line_to_add(rpg, verb):
    Path("sums.csv").write_text("question,answer,level\n1 + 1,2,a\n2 + 2,4,b\n")
    Path("reward.py").write_text("def score(response, answer, level, *, scale=1.0): ...\n")
    assert rpg("init", "own", "--data", "sums.csv", "--reward", "reward.py")[0] == 0
    spec = Path("own/experiment.yaml")
    spec.write_text(spec.read_text().replace(', keep: ["level"]', "", 1))
    code, _, err = rpg(verb, "own/experiment.yaml")
    assert (code, err) == (
        2,
        "own/experiment.yaml:20: data.train.0: score takes `level`, which the set does not keep\n"
        "    20 |     - source: csv\n"
        "  allowed: prompt, answer, dataset, problem, response\n"
        "  hint: write `columns: {prompt: question, answer: answer, keep: [level]}`\n"
        "1 error; nothing was run\n",
    )


@pytest.mark.more
def test_a_reward_function_that_takes_what_problems_lack_is_refused(rpg):
    Path("reward.py").write_text("def score(response, answer, config, depth): ...\n")
    Path("spec.yaml").write_text(STARTER)
    code, _, err = rpg("validate", "--deep", "spec.yaml", "--set", "reward={type: python, path: reward.py}")
    assert code == 2
    assert "data.train.0: score takes `depth`, which a problem does not have\n" in err


def test_a_chat_template_is_a_file_or_a_text(rpg):
    Path("sums.csv").write_text("question,answer\n1 + 1,2\n2 + 2,4\n")
    Path("own").mkdir()
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    Path("own/chat.jinja").write_text(template)
    assert rpg("init", "own", "--data", "sums.csv")[0] == 0
    spec = Path("own/experiment.yaml")
    asked = 'prompt: {type: template, template: "{prompt}\\n"}'
    text = spec.read_text().replace("max_prompt_length: 16", "max_prompt_length: 64")
    text = text.replace("max_position_embeddings: 24", "max_position_embeddings: 128")
    for given in ("chat.jinja", f"'{template}'"):
        spec.write_text(text.replace(asked, f"prompt: {{type: chat, chat_template: {given}}}"))
        assert rpg("validate", "--deep", "own/experiment.yaml")[::2] == (0, "")
        assert load_document(spec).experiment.data.prompt.chat_template == template
    spec.write_text(text.replace(asked, "prompt: {type: chat, chat_template: none.jinja}"))
    code, _, err = rpg("validate", "own/experiment.yaml")
    assert code == 2
    assert err.startswith("own/experiment.yaml:29: data.prompt.chat_template: no such file\n")
    raising = "{{ raise_exception('no such role') }}"
    spec.write_text(text.replace(asked, f'prompt: {{type: chat, chat_template: "{raising}"}}'))
    code, _, err = rpg("validate", "--deep", "own/experiment.yaml")
    assert (code, "data.prompt: the chat template fails on prompt 1: " in err, "no such role" in err) == (2, True, True)


def test_init_writes_a_spec_whose_model_is_made_on_the_spot_and_whose_reward_is_a_file(rpg):
    Path("sums.csv").write_text("question,answer\n" + "".join(f"{n} + 1,{n + 1}\n" for n in range(120)))
    Path("reward.py").write_text("def grade(response, answer):\n    return float(response == answer)\n")
    assert rpg("init", "own", "--data", "sums.csv", "--reward", "reward.py")[0] == 0
    assert rpg("validate", "--deep", "own/experiment.yaml")[::2] == (0, "")
    harder = "".join(f"{n} + {10**20} =,{10**20 + n}\n" for n in range(90))
    Path("sums.csv").write_text("question,answer\n" + "".join(f"{n} + 1,{n + 1}\n" for n in range(90)) + harder)
    Path("reward.py").write_text("def _norm(text): ...\ndef grade(response, answer): ...\n")
    assert rpg("init", "sorted", "--data", "sums.csv", "--reward", "reward.py")[0] == 0
    text = Path("sorted/experiment.yaml").read_text()
    assert "max_prompt_length: 32 " in text, "the longest prompts come last"
    assert "limit: 90\n" in text, "half of a small file"
    assert "function: grade}" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("--data", "odd.csv", "--model", "m"),
            "odd.csv: cannot tell which column holds the prompts\n  given: a, b\n"
            "  hint: name the column with `--prompt COLUMN`\n",
        ),
        (
            ("--data", "odd.csv", "--prompt", "c"),
            "odd.csv: --prompt: no such column\n  given: c    allowed: a, b\n",
        ),
        (
            (
                "--data",
                "rows.csv",
            ),
            "rows.csv: rows.csv, line 3: 3 values for 2 columns\n",
        ),
        (("--data", "none.csv", "--model", "m"), "none.csv: no such file\n"),
        (
            ("--data", "odd.txt", "--model", "m"),
            "odd.txt: has an unknown file suffix\n"
            "  allowed: .jsonl, .json, .csv, .tsv, .parquet, or a dataset's directory or",
        ),
        (
            ("--data", "bad.jsonl", "--model", "m"),
            "bad.jsonl: bad.jsonl, line 1: not JSON: Expecting value at character 1\n",
        ),
        (
            ("--data", "odd.csv", "--model", "m", "--reward", "exact_matches"),
            "--reward: unknown reward\n  given: exact_matches",
        ),
        (("--data", "odd.csv", "--reward", "none.py"), "none.py: cannot be read: No such file or directory\n"),
        (("--data", "odd.csv", "--reward", "two.py"), "two.py: has no function `score`\n  allowed: one, other\n"),
        (("--data", "good.csv", "--model", "./m"), "--model: no such directory\n  given: ./m"),
    ],
)
def test_init_says_what_it_cannot_make_of_a_file(rpg, arguments, told):
    Path("odd.csv").write_text("a,b\n1,2\n")
    Path("rows.csv").write_text("question,answer\n1,2\n1,2,3\n")
    Path("good.csv").write_text("question,answer\n1,2\n")
    Path("two.py").write_text("def one(): ...\ndef other(): ...\n")
    Path("odd.txt").write_text("a\n")
    Path("bad.jsonl").write_text("oh\n")
    code, _, err = rpg("init", "own", *arguments)
    assert code == 2
    assert err.startswith(told)
    assert not Path("own/experiment.yaml").exists()


def test_a_command_that_is_named_next_can_be_given_to_a_shell(rpg):
    assert rpg("init", "my specs")[1].endswith("\nnext: cd 'my specs' && rpg run experiment.yaml\n")
    study = rpg("study", "run", "my specs/experiment.yaml")
    assert "hint: `rpg run 'my specs/experiment.yaml'`\n" in study[2]


@pytest.mark.parametrize("typed", ["{0} seeds=[0,1]", "seeds=[0,1] {0}", "--set training.steps=5 {0} seeds=[0,1]"])
def test_a_setting_needs_no_set(rpg, typed):
    assert rpg("init", ".")[0] == 0
    said = rpg("validate", "--json", *typed.format("experiment.yaml").split())
    assert (said[0], json.loads(said[1])[0]["seeds"]) == (0, [0, 1])


def test_a_word_with_an_equals_sign_is_a_file_if_it_ends_like_one_or_is_there(rpg):
    assert rpg("validate", "lr=1.yaml")[2] == "lr=1.yaml: no such file\n1 error; nothing was run\n"
    assert rpg("init", ".")[0] == 0
    Path("lr=1").write_text(Path("experiment.yaml").read_text())
    assert rpg("validate", "lr=1")[1].startswith("lr=1: experiment starter: ")


@pytest.mark.parametrize("word", ["ls", "list", "status"])
def test_runs_have_the_names_that_others_give_the_verb(rpg, word):
    assert rpg(word, "--json") == rpg("runs", "--json")


def test_help_and_version_are_verbs_too(rpg):
    assert rpg("version") == rpg("--version")
    assert rpg("help") == rpg("--help")
    assert rpg("help", "study", "run") == rpg("study", "run", "--help")


@pytest.mark.parametrize(("word", "verb"), [("train", "run"), ("sweep", "study run"), ("stop", "cancel")])
def test_a_verb_of_other_tools_names_ours(rpg, word, verb):
    code, _, said = rpg(word, "experiment.yaml")
    assert code == 2
    assert f"No such command '{word}'. Did you mean 'rpg {verb}'?" in said


def test_each_verb_that_is_named_for_another_exists():
    groups = {*chain(*verbs.PANELS.values())}
    assert {name.partition(" ")[0] for name in (*words.ALSO.values(), *words._MEANT.values())} <= groups
    assert not {*words.ALSO, *words._MEANT} & groups


def test_init_where_nothing_can_be_written(rpg):
    Path("file").write_text("")
    code, out, err = rpg("init", "file/new")
    assert (code, out) == (2, "")
    assert err.startswith("file/new: cannot be written: Not a directory\n")


def test_validate_loads_nothing_heavy():
    code = (
        "import sys; sys.argv = ['rpg', 'validate', sys.argv[1]]\n"
        "from pipelines.cli import main\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'prefect', 'duckdb', 'optuna', 'pyarrow', 'transformers', 'numpy', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    starter = str(Path(specs.__file__).parent / "experiments" / "starter.yaml")
    done = subprocess.run([sys.executable, "-c", code, starter], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_brackets_in_a_question_are_shown_as_they_are(rpg):
    question = "Does [bold]it[/bold] help [/] 🚀?"
    Path("a.yaml").write_text(STARTER)
    code, out, err = rpg("plan", "a.yaml", "--set", f"question={json.dumps(question, ensure_ascii=False)}")
    assert (code, err) == (0, "")
    assert f"starter  {question}" in out


def test_a_resolved_plan_has_each_cells_whole_spec_with_the_origin_of_each_value(rpg):
    Path("a.yaml").write_text(STARTER)
    matrix = "extends: a.yaml\nseeds: [0, 1]\nmatrix:\n  product:\n    objective.type: [rpg, grpo]\n"
    Path("b.yaml").write_text(matrix)
    code, out, _ = rpg("plan", "b.yaml", "--resolved", "--set", "training.steps=7")
    assert code == 0
    cells = out.split("objective.type=")[1:]
    assert [cell.split("\n")[0] for cell in cells] == ["rpg", "grpo"]
    lines = {line.split()[0]: line.split()[1:] for line in cells[1].splitlines()[1:] if line}
    line = 1 + next(number for number, text in enumerate(STARTER.splitlines()) if text.startswith("  kl_coef:"))
    assert lines["objective.type"] == ["grpo", "b.yaml:5", "(matrix)"]
    assert lines["objective.kl_coef"] == ["0.01", f"a.yaml:{line}"]
    assert lines["objective.aggregation"] == ["sequence_mean", "published"]
    assert lines["advantage.scale"] == ["group_std", "published"]
    assert lines["training.steps"] == ["7", "--set"]
    assert lines["training.epochs"] == ["1", "default"]
    spec = {field["path"]: field for field in json.loads(rpg("plan", "b.yaml", "--resolved", "--json")[1])[0]["spec"]}
    assert spec["seeds"] == {"path": "seeds", "value": [0, 1], "origin": "matrix", "file": "b.yaml", "line": 2}
    assert spec["objective.divergence"]["value"] == "unnormalized_reverse"
    assert not Path(".rpg").exists()


def test_a_plan_of_many_runs_sums_them_up_and_shows_each_on_request(rpg):
    Path("a.yaml").write_text(STARTER)
    many = ("plan", "a.yaml", "--set", "seeds=[0, 1, 2, 3, 4, 5, 6, 7, 8]")
    summed, each = rpg(*many)[1], rpg(*many, "--all")[1]
    assert "9 runs; `--all` shows each\n  data      RUN  9  new" in summed
    assert "starter-s0-" not in summed
    assert each.count("starter-s") == 9
    assert summed.split("\n\n")[2:] == each.split("\n\n")[2:], "the estimates are the same"


class Room(NamedTuple):
    total: int
    used: int
    free: int


def test_a_plan_shows_what_token_rows_take_and_warns_where_the_disk_is_small_for_them(rpg, monkeypatch):
    Path("a.yaml").write_text(STARTER)
    few = ("plan", "a.yaml", "--set", "training.steps=4096")
    monkeypatch.setattr("shutil.disk_usage", lambda _: Room(total=2**40, used=0, free=2**40))
    code, out, err = rpg(*few)
    assert (code, "\nrecord  token rows of at most " in out) == (0, True), err
    assert "(record.tokens: all)" in out
    assert "token rows" not in err
    monkeypatch.setattr("shutil.disk_usage", lambda _: Room(total=2**40, used=0, free=2**26))
    assert "record.tokens: token rows take " in rpg(*few)[2]
    none = rpg(*few, "--set", "record.tokens=none")
    assert "token rows" not in none[1] + none[2]


def test_a_plan_refuses_what_offline_cannot_be_had_and_warns_of_it_else(rpg, monkeypatch):
    Path("a.yaml").write_text(STARTER)
    asked = ("plan", "a.yaml", "--set", "model={source: pretrained, path: nobody/model}")
    # In the environment too, which a look has that is a fork of what an earlier command imported.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, err = rpg(*asked)
    assert (code, "model.path: the model is not on this machine, and HF_HUB_OFFLINE forbids fetching it" in err) == (
        2,
        True,
    )
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    code, _, err = rpg(*asked)
    assert (code, "warning" in err and "does not answer" in err) == (0, True), err


def test_where_a_directory_above_has_the_home_it_is_named(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RPG_HOME", raising=False)
    (tmp_path / ".rpg").mkdir()
    (tmp_path / "papers" / "one").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "papers" / "one")
    told = f"this directory has no home, but {tmp_path}/.rpg exists: run rpg in {tmp_path}\n"
    assert call("runs")[2] == f"{told}no runs in {tmp_path}/papers/one/.rpg\n"
    assert call("show", "sums")[2] == f"there is no run `sums`: {told}"
    monkeypatch.chdir(tmp_path)
    assert "there is no home" not in call("runs")[2]
    monkeypatch.setenv("RPG_HOME", str(tmp_path / "papers" / "other"))
    assert "there is no home" not in call("runs")[2]


@pytest.mark.more
def test_a_look_at_what_was_looked_at_before_is_spared_and_one_at_other_problems_asks_nothing_of_the_model(
    rpg, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    looked_at_model, looking = list[bool](), preflight.examine

    def examine(experiment: Experiment, *, model: bool) -> Findings:
        looked_at_model.append(model)
        return looking(experiment, model=model)

    def looks(*arguments: str) -> list[bool]:
        looked_at_model.clear()
        rpg("validate", "--deep", "a.yaml", *arguments)
        return list(looked_at_model)

    monkeypatch.setattr("rpg.preflight.examine", examine)
    Path("rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    own = "data.train=[{source: jsonl, path: rows.jsonl, columns: {prompt: prompt, answer: answer}}]"
    whole_prompts = STARTER.replace("{metadata.expression} =", "{prompt}").replace("length: 16 ", "length: 100 ")
    Path("a.yaml").write_text(whole_prompts.replace("embeddings: 64", "embeddings: 128"))
    assert looks() == [True]
    assert looks() == []
    assert looks("--set", own) == [False]
    assert looks("--set", own) == []
    Path("rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "two"}\n')
    assert looks("--set", own) == [False], "another file of the same name"
    assert looks("--set", "model.config.num_hidden_layers=3") == [True]
    assert looks("--set", "training.lora={rank: 2}") == [True]
    of_the_hub = "data.evaluation=[{source: hub, name: far, path: nobody/data}]"
    assert looks("--set", of_the_hub) == looks("--set", of_the_hub) == [False], "it may be another one by now"
    wrong = "model.config.hidden_width=33"
    assert looks("--set", wrong) == looks("--set", wrong) == [True], "what is wrong is said each time"


def test_what_a_server_says_of_its_tools_is_looked_at_each_time(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = make_plan(load_document(STARTER_FILE), Home(tmp_path / "home")).runs[0]
    assert _note_of_look(run, True) is not None
    tools = "{type: tools, tools: [{type: mcp, command: [cat]}], format: {type: hermes}, answer_tokens: 2}"
    changed = load_document(STARTER_FILE, [f"rollout.rollouter={tools}"])
    assert _note_of_look(make_plan(changed, Home(tmp_path / "home")).runs[0], True) is None


def test_runs_go_on_together_where_all_were_begun_from_the_document_that_the_experiment_has_now(tmp_path):
    home, seeds = Home(tmp_path / "home"), "seeds=[0, 1]"
    document = load_document(STARTER_FILE, [seeds])
    runs = make_plan(document, home).runs
    register_experiment(home, document, runs)
    register_runs(home, document, runs, durable=False)
    run_ids = [run.run_id for run in runs]
    found = _document_of_all(home, "starter", run_ids)
    assert found.to_json() == document.to_json()
    assert _document_of_all(home, "starter@1", run_ids) is None, "it would become the current version"
    assert _document_of_all(home, "starter", run_ids[:1]) is None
    other = load_document(STARTER_FILE, [seeds, "training.checkpoint.every_steps=3"])
    register_runs(home, other, runs[:1], durable=False)
    assert _document_of_all(home, "starter", run_ids) is None, "each goes on as it was begun"
