"""Every spec file in the repository loads, asks a question below its schema, and warns of nothing.

The paper's own experiments have warnings only of the paper's choices.
"""

from pathlib import Path

import pytest

import specs
from pipelines.home.home import Home
from pipelines.planning.plan import make_plan
from specs.document import Document, expand
from specs.loader import load_any
from specs.schema.study import Cases, Choice
from specs.study_document import StudyDocument
from specs.study_space import bounds, build, names, settings

HERE = Path(specs.__file__).parent
PUBLISHED = {
    "the divergence is negligible compared with the reward",
    "settings that the spec leaves out differ between the cells, because their objectives were published with"
    " different ones",
    "dynamic sampling throws away groups that have an advantage",
    "the matrix of the extended file also varies fields",
}
FILES = sorted(
    file for kind in ("experiments", "objectives", "studies", "evaluations") for file in (HERE / kind).rglob("*.yaml")
)


def test_there_are_specs_to_load():
    assert {"quickstart.yaml", "starter.yaml"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_spec_loads_and_says_what_it_answers(file):
    document = load_any(file)
    if isinstance(document, Document):
        assert expand(document)
    modeline, first, *_ = file.read_text("utf-8").splitlines()
    schema = modeline.removeprefix("# yaml-language-server: $schema=")
    assert (file.parent / schema).resolve().parent == HERE / "json"
    assert first.startswith("# ")
    assert "?" in first
    published = PUBLISHED if file.parent.name == "paper" else set()
    assert {warning.message for warning in document.warnings} <= published


@pytest.mark.more
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_spec_is_planned(file, tmp_path):
    document = load_any(file)
    if isinstance(document, StudyDocument):
        space = document.study.parameters
        document = document.trial(settings(build(space, lambda path: lowest(space[path])), space))
    runs = make_plan(document, Home(tmp_path)).runs
    assert len({run.run_id for run in runs}) == len(runs) == len(expand(document))
    trains = ["train"] if document.experiment.trains else []
    assert [stage.stage for stage in runs[0].stages] == ["data", "base", *trains, "evaluate", "report"]
    assert {stage.action for run in runs for stage in run.stages} == {"RUN"}
    # What does not vary is made once.
    models = {run.experiment.model.model_dump_json() for run in runs}
    made = {_made_of(run.experiment) for run in runs}
    assert len({run.stage("base").fingerprint for run in runs}) == len(made)
    assert len(models) == 1 or not document.experiment.trains
    labels = document.experiment.matrix.labels if document.experiment.matrix else ()
    assert all(any(run.name.startswith(label) for label in labels) for run in runs if labels)


def lowest(searched):
    return names(searched)[0] if isinstance(searched, Choice | Cases) else bounds(searched)[0]


def _made_of(experiment):
    """What a base model follows from: with a warm-up the training problems too."""
    learnt = experiment.data.train if experiment.warm_up else ()
    return experiment.model.model_dump_json(), str(experiment.warm_up), str(learnt)
