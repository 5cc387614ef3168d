"""A spec may name a variant of an installed package, and its errors are reported like those of any other field."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from places import PACKAGES
from spec_text import GOOD, changed, message, write

from specs.document import Document, experiment_of
from specs.errors import SpecError
from specs.extensions import our_names
from specs.loader import load_document, load_experiment
from specs.schema.reward import Reward

REWARDS = ", ".join(our_names(Reward.package))
BREVITY = changed("reward: {type: exact_match}", "reward: {type: brevity, spare: 5}")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package with a reward and a data source is installed."""
    monkeypatch.syspath_prepend(str(PACKAGES))


def offers(folder: Path, name: str, entry: str) -> None:
    """A package with one more entry point, beside the working directory's files."""
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[rpg.rewards]\n{entry}\n")


@pytest.mark.usefixtures("installed")
def test_an_installed_reward_takes_its_own_options():
    reward = load_experiment(write(BREVITY)).reward
    assert reward.model_dump() == {
        "type": "brevity",
        "overlong": None,
        "strip_thinking": False,
        "timeout_seconds": 10.0,
        "spare": 5,
        "slope": 0.1,
    }


@pytest.mark.usefixtures("installed")
def test_options_of_an_installed_reward_are_checked_like_ours():
    assert message(BREVITY.replace("spare: 5", "spre: 5, slope: -1")) == (
        "spec.yaml:12: reward.slope: must be greater than 0\n"
        "    12 | reward: {type: brevity, spre: 5, slope: -1}\n"
        "  given: -1    allowed: a number, greater than 0\n"
        "  hint: Reward taken off for each character beyond.\n"
        "spec.yaml:12: reward.spre: unknown field\n"
        "    12 | reward: {type: brevity, spre: 5, slope: -1}\n"
        "  allowed: overlong, slope, spare, strip_thinking, timeout_seconds, type\n"
        "  hint: did you mean `spare`?\n"
        "2 errors; nothing was run"
    )
    assert "reward.spare: must be a whole number" in message(BREVITY.replace("spare: 5", 'spare: "5"'))


@pytest.mark.usefixtures("installed")
def test_an_unknown_name_is_told_with_ours_and_the_installed_ones():
    assert message(BREVITY.replace("brevity", "brevty")) == (
        "spec.yaml:12: reward.type: unknown type\n"
        "    12 | reward: {type: brevty, spare: 5}\n"
        f'  given: "brevty"    allowed: {REWARDS}, brevity (rpg-brevity 0.3)\n'
        "  hint: did you mean `brevity`? a package with an entry point in `rpg.rewards` adds another\n"
        "1 error; nothing was run"
    )


def test_a_package_that_is_not_installed_is_an_unknown_name():
    assert message(BREVITY) == (
        "spec.yaml:12: reward.type: unknown type\n"
        "    12 | reward: {type: brevity, spare: 5}\n"
        f'  given: "brevity"    allowed: {REWARDS}\n'
        "  hint: a package with an entry point in `rpg.rewards` adds another\n"
        "1 error; nothing was run"
    )


def test_a_reward_without_a_type_is_told_which_there_are():
    assert message(changed("reward: {type: exact_match}", "reward: {}")) == (
        "spec.yaml:12: reward.type: missing\n"
        "    12 | reward: {}\n"
        f"  allowed: {REWARDS}\n"
        "  hint: say which type it is\n"
        "1 error; nothing was run"
    )


def test_a_package_that_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    offers(tmp_path, "rpg-broken", "brevity = no_such_module:Brevity")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert (
        "reward.type: rpg-broken 1.0 cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'\n"
        in message(BREVITY)
    )


def test_a_package_that_offers_no_reward_is_told_what_one_is(tmp_path, monkeypatch):
    offers(tmp_path, "rpg-path", "brevity = pathlib:Path")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert message(BREVITY) == (
        "spec.yaml:12: reward.type: rpg-path 1.0 offers something else: pathlib:Path\n"
        "    12 | reward: {type: brevity, spare: 5}\n"
        '  given: "brevity"\n'
        "  hint: an entry point of rpg.rewards names a subclass of specs.schema.reward.Reward with score()\n"
        "1 error; nothing was run"
    )


@pytest.mark.usefixtures("installed")
def test_two_packages_with_one_name_are_both_named(tmp_path, monkeypatch):
    offers(tmp_path, "rpg-other", "brevity = rpg_brevity.reward:Brevity")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "two packages offer this type: rpg-other 1.0 and rpg-brevity 0.3\n" in message(BREVITY)


def test_a_name_of_ours_is_ours_whatever_is_installed(tmp_path, monkeypatch):
    offers(tmp_path, "rpg-thief", "exact_match = rpg_brevity.reward:Brevity")
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = load_experiment(write(GOOD)).reward
    assert type(reward).__module__ == "rpg.rewards.functions.exact_match"


@pytest.mark.usefixtures("installed")
def test_name_options_and_version_of_the_package_are_part_of_the_identity():
    reward = load_experiment(write(BREVITY)).reward
    assert reward.identity() == {"type": "brevity (rpg-brevity 0.3)", "spare": 5, "slope": 0.1}
    assert load_experiment(write(GOOD)).reward.identity() == {"type": "exact_match"}


@pytest.mark.usefixtures("installed")
def test_options_can_be_set_and_searched_by_their_paths():
    write(BREVITY)
    assert load_experiment("spec.yaml", ("reward.spare=7",)).reward.identity()["spare"] == 7
    matrix = "matrix: {product: {reward.slope: [0.1, 0.2], reward.spare: [3, 0]}}\n"
    assert "spec.yaml:24: reward.spare: must be at least 1\n" in message(BREVITY + matrix)
    assert "--set reward.slop=1: reward.slop: unknown field\n" in message(BREVITY, "reward.slop=1")


@pytest.mark.usefixtures("installed")
def test_another_type_keeps_what_all_rewards_have_and_drops_the_options():
    write(BREVITY.replace("spare: 5", "spare: 5, overlong: {buffer: 4}"))
    reward = load_experiment("spec.yaml", ("reward.type=math_dapo",)).reward
    assert reward.model_dump(exclude_defaults=True) == {"type": "math_dapo", "overlong": {"buffer": 4}}


TERMS = (
    "reward: {type: weighted_sum, terms: [{reward: {type: exact_match}},"
    " {weight: 0.5, reward: {type: brevity, spare: 5}}]}"
)


@pytest.mark.usefixtures("installed")
def test_a_weighted_sum_takes_rewards_of_ours_and_of_packages():
    reward = load_experiment(write(changed("reward: {type: exact_match}", TERMS))).reward
    assert reward.identity() == {
        "type": "weighted_sum",
        "terms": [
            {"reward": {"type": "exact_match"}, "weight": 1.0, "name": ""},
            {"reward": {"type": "brevity (rpg-brevity 0.3)", "spare": 5, "slope": 0.1}, "weight": 0.5, "name": ""},
        ],
    }


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("brevity,", "brevty,", "reward.terms.1.reward.type: unknown type\n"),
        ("spare: 5", "spare: 0", "reward.terms.1.reward.spare: must be at least 1\n"),
        ("weight: 0.5", "weigt: 0.5", "reward.terms.1.weigt: unknown field\n"),
        ("brevity, spare: 5", "exact_match", "reward.terms.1.name: two terms have this name\n"),
        (
            "spare: 5",
            "spare: 5, timeout_seconds: 3",
            "reward.terms.1.reward.timeout_seconds: belongs to the sum, not",
        ),
        (
            "exact_match",
            "reasoning_gym, overlong: {buffer: 1}",
            "reward.terms.0.reward.overlong: belongs to the sum, n",
        ),
    ],
)
def test_what_is_wrong_with_a_term_is_told_at_the_term(old, new, told):
    text = changed("reward: {type: exact_match}", TERMS)
    assert text.count(old) == 1
    assert told in message(text.replace(old, new))


@pytest.mark.usefixtures("installed")
def test_a_frozen_document_and_a_resolved_spec_keep_the_options():
    document = load_document(write(BREVITY))
    frozen = json.loads(json.dumps(document.to_json()))
    assert Document.from_json(frozen) == document
    assert experiment_of(json.loads(document.experiment.model_dump_json()), {}) == document.experiment


def test_a_resolved_spec_whose_package_is_gone_says_so(monkeypatch):
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(PACKAGES))
        resolved = load_document(write(BREVITY)).experiment.model_dump(mode="json")
    with pytest.raises(SpecError, match=r"reward\.type: unknown type"):
        experiment_of(resolved, {})


@pytest.mark.usefixtures("installed")
def test_files_that_an_installed_source_names_are_relative_to_the_spec_and_must_be_there(tmp_path):
    (tmp_path / "specs").mkdir()
    bits = "{source: bits, bits: 3, files: [more.txt]}"
    write(GOOD.replace("{source: reasoning_gym, task: chain_sum, size: 100}", bits), "specs/spec.yaml")
    write("", "specs/morn.txt")
    with pytest.raises(SpecError) as missing:
        load_experiment("specs/spec.yaml")
    assert str(missing.value) == (
        "specs/spec.yaml:7: data.train.0.files.0: no such file\n"
        "    7 |     - {source: bits, bits: 3, files: [more.txt]}\n"
        f"  given: {tmp_path}/specs/more.txt\n"
        "  hint: did you mean `morn.txt`?"
    )
    write("0101\n", "specs/more.txt")
    source = load_experiment("specs/spec.yaml").data.train[0]
    assert [problem.answer for problem in source.read()] == [*"00001111", "0"]


@pytest.mark.parametrize(
    "module",
    [
        *("rpg_brevity/reward", "rpg_brevity/source"),
        *("rpg_check_again/environment", "rpg_check_again/tools"),
        "rpg_second_moment/objective",
    ],
)
def test_the_packages_are_those_that_the_docs_show(module):
    page = (PACKAGES.parents[1] / "docs" / "extending.md").read_text()
    assert f"```python\n{(PACKAGES / f'{module}.py').read_text()}```" in page


def test_the_entry_points_are_those_that_the_docs_show():
    page = (PACKAGES.parents[1] / "docs" / "extending.md").read_text()
    block, *others = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    project = tomllib.loads(block)["project"]
    (metadata,) = PACKAGES.glob("rpg_brevity-*.dist-info")
    offered = {entry.name: (entry.group, entry.value) for entry in PathDistribution(metadata).entry_points}
    shown = {name: (group, value) for group, names in project["entry-points"].items() for name, value in names.items()}
    assert offered == shown
    assert metadata.name == f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    offers = [
        {offer.group: {offer.name: offer.value}}
        for package in ("rpg_check_again", "rpg_second_moment")
        for metadata in PACKAGES.glob(f"{package}-*.dist-info")
        for offer in PathDistribution(metadata).entry_points
    ]
    shown_elsewhere = [tomllib.loads(other)["project"]["entry-points"] for other in others]
    assert sorted(shown_elsewhere, key=str) == sorted(offers, key=str)


def test_checking_a_spec_searches_the_installed_packages_only_for_a_name_that_is_not_ours():
    code = (
        "import importlib.metadata as packages, sys\n"
        "from specs.loader import load_experiment\n"
        "asked = []\n"
        "real = packages.entry_points\n"
        "packages.entry_points = lambda **given: asked.append(given['group']) or real(**given)\n"
        "load_experiment('spec.yaml')\n"
        "try:\n    load_experiment('spec.yaml', ('reward.type=brevity',))\nexcept Exception:\n    pass\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'math_verify', 'reasoning_gym', 'transformers'}\n"
        "print(asked, sorted(heavy & set(sys.modules)))\n"
    )
    write(GOOD)
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "['rpg.rewards'] []\n"
