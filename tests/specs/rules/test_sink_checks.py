"""What `sinks` may say, and that it changes no run."""

import pytest
from spec_text import GOOD, message, write

from pipelines.planning.fingerprint import train_identity
from specs.loader import load_experiment
from specs.schema.execution import TensorboardSink, missing_packages, not_installed

SINKS = """\
sinks:
  - {type: tensorboard}
  - {type: wandb, project: rpg-math, mode: offline, tags: [night]}
  - {type: mlflow, tracking_uri: "https://mlflow.lab.org", experiment: sums}
"""


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_sinks_leave_the_fingerprint_alone():
    plain, sent = load_experiment(write(GOOD)), load_experiment(write(GOOD + SINKS))
    assert [sink.type for sink in sent.sinks] == ["tensorboard", "wandb", "mlflow"]
    assert sent.identity() == plain.identity()
    assert train_identity(sent) == train_identity(plain)


def test_a_password_in_the_spec_is_refused_and_not_repeated():
    told = message(GOOD + 'sinks:\n  - {type: mlflow, tracking_uri: "https://me:wortwort@mlflow.lab.org"}\n')
    assert told == (
        "spec.yaml:25: sinks.0.tracking_uri: holds a secret\n"
        "    25 | (hidden)\n"
        "  given: (hidden)    allowed: an address without a password\n"
        "  hint: a spec is stored and shared: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead\n"
        "1 error; nothing was run"
    )


@pytest.mark.parametrize(
    ("sinks", "told"),
    [
        ("[{type: neptune}]", "sinks.0.type: unknown type"),
        ("[{type: wandb}]", "sinks.0.project: missing"),
        ("[{type: wandb, project: a/b}]", "sinks.0.project: has the wrong form"),
        ("[{type: tensorboard}, {type: tensorboard}]", "sinks.1: there is a sink of this type already"),
    ],
)
def test_a_sink_that_cannot_be_is_told_at_its_line(sinks, told):
    assert message(GOOD + f"sinks: {sinks}\n").startswith(f"spec.yaml:24: {told}")


def test_a_package_that_is_missing_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(TensorboardSink, "package", "no_such_package")
    sinks = load_experiment(write(GOOD + "sinks: [{type: tensorboard}]\n")).sinks
    assert not_installed(sinks[0]) == 'no_such_package is not installed: pip install "rpg-experiments[tensorboard]"'
    assert [issue.path for issue in missing_packages(sinks)] == [("sinks", 0)]
