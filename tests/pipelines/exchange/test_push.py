"""`rpg push`: a run's model with its card, sent to a Hub on this machine by huggingface_hub, and read back there."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from local_hub import READ_ONLY, TOKEN, LocalHub, Repository, local_hub
from unpacked_home import unpack

from specs.loader import load_document

# huggingface_hub hands files to its client in a way that the client finds outdated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")
RUN = "finished-s0-5c295933"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a home whose runs have trained, weights of an earlier step and an adapter among them."""
    place = tmp_path_factory.mktemp("push")
    unpack(place)
    weights = place / "home" / "runs" / RUN / "weights"
    (weights / "step-000002" / "adapter").mkdir(parents=True)
    (weights / "step-000002" / "model.safetensors").write_bytes(b"merged")
    (weights / "step-000002" / "adapter" / "adapter_model.safetensors").write_bytes(b"adapter")
    spec = weights.parent / "spec.json"
    read = json.loads(spec.read_text())
    read["model"] = {"source": "pretrained", "path": "Qwen/Qwen3-4B-Base", "revision": "main"}
    read["data"]["train"].append({"source": "hub", "path": "open-r1/DAPO-Math-17k-Processed", "split": "train"})
    spec.write_text(json.dumps(read))
    base = next((place / "home" / "artifacts" / "base").glob("982e*"))
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\nA base model.\n")
    return place


@pytest.fixture
def hub(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with local_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("RPG_HOME", str(place / "home"))
        yield hub


@pytest.mark.more
def test_a_model_arrives_with_its_card_in_one_commit(place: Path, hub: LocalHub, call: Call, tmp_path: Path) -> None:
    code, out, err = call("push", "5c295933", "--to", "sums")
    assert (code, out.startswith(f"{hub.url}/alice/sums/commit/")) == (0, True), err
    assert f"{RUN}, step 4, is alice/sums now, private" in err
    there = hub.repositories["alice/sums"]
    assert (there.private, there.commits) == (True, [f"{RUN}, step 4"])
    weights = place / "home" / "runs" / RUN / "weights" / "step-000004"
    assert {name: there.files[name] for name in os.listdir(weights)} == {
        file.name: file.read_bytes() for file in weights.iterdir()
    }
    card = ModelCard(there.files["README.md"].decode())
    described = card.data.to_dict()  # type: ignore[no-untyped-call]
    assert [each["name"] for each in described.pop("model-index")] == ["sums"]
    assert described == {
        "base_model": "Qwen/Qwen3-4B-Base",
        "base_model_relation": "finetune",
        "datasets": ["open-r1/DAPO-Math-17k-Processed"],
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "regularized-policy-gradient", "rpg"],
    }
    text = card.text
    assert "| sums | 87.5 % [29.7, 98.3] | 4 | 87.5 % [29.7, 98.3] | +0.0 points [-6.6, +6.6] | 8 |" in text
    assert "exact on policy, holds" in text
    for lineage in ("base model | Qwen/Qwen3-4B-Base", "data train.parquet | SHA-256 `e3b23cf8", f"run | `{RUN}`"):
        assert lineage in text
    (spec,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert spec == there.files["spec.yaml"].decode()
    (tmp_path / "spec.yaml").write_text(spec)
    document = load_document(tmp_path / "spec.yaml")
    assert document.experiment.objective.kl_coef == 0.01
    assert document.experiment.seeds == (0,)


@pytest.mark.long
def test_the_hub_is_the_one_that_the_environment_names(place: Path, hub: LocalHub) -> None:
    named = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN, "RPG_HOME": str(place / "home")}
    command = [sys.executable, "-c", "from pipelines.cli import main; main()", "push", RUN, "--to", "alice/sums"]
    result = subprocess.run(command, env=os.environ | named, capture_output=True, text=True, check=False)
    assert (result.returncode, list(hub.repositories)) == (0, ["alice/sums"]), result.stderr


@pytest.mark.more
def test_no_progress_bar_is_shown_on_a_terminal(place: Path, hub: LocalHub) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "RPG_HOME": str(place / "home")}
    environment.pop("HF_HUB_DISABLE_PROGRESS_BARS", None)
    command = [sys.executable, "-c", "from pipelines.cli import main; main()", "push", RUN, "--checkpoint", "2"]
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 80))
    with subprocess.Popen(
        [*command, "--to", "bars"], stderr=end, stdout=subprocess.DEVNULL, env=environment
    ) as process:
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # how the last of it ends
            while part := os.read(terminal, 4096):
                shown += part
    os.close(terminal)
    assert process.returncode == 0, shown
    assert b"is alice/bars now" in shown
    assert b"\\r" not in shown
    assert b"\n\r\n" not in shown  # nor an empty line in its place


@pytest.mark.more
def test_a_later_push_leaves_no_weights_of_the_one_before(hub: LocalHub, call: Call) -> None:
    code, _, err = call("push", RUN, "--to", "alice/sums", "--checkpoint", "2", "--public")
    assert (code, err.splitlines()[-1]) == (0, f"{RUN}, step 2, is alice/sums now, public")
    there = hub.repositories["alice/sums"]
    assert there.files["adapter/adapter_model.safetensors"] == b"adapter"
    assert "`adapter/` has it alone" in there.files["README.md"].decode()
    there.files["notes.md"] = b"mine"
    code, _, err = call("push", RUN, "--to", "alice/sums", "--checkpoint", "best", "--public")
    assert code == 0, err
    assert "adapter/adapter_model.safetensors" not in there.files
    assert there.files["notes.md"] == b"mine"
    assert len(there.files["model.safetensors"]) > len(b"merged")
    assert there.commits == [f"{RUN}, step 2", f"{RUN}, step 4"]
    code, _, err = call("push", RUN, "--to", "alice/sums")
    assert (code, err.startswith("alice/sums is public, but the push is private: ")) == (2, True)
    assert len(there.commits) == 2


def test_a_dry_run_writes_what_would_go_and_sends_nothing(hub: LocalHub, call: Call, tmp_path: Path) -> None:
    target = tmp_path / "card"
    code, out, err = call("push", RUN, "--to", "alice/sums", "--dry-run", str(target))
    assert (code, err) == (0, f"{target}: the files that would be pushed to alice/sums, private; nothing was sent\n")
    assert [line.split()[0] for line in out.splitlines()] == sorted(os.listdir(target))
    assert {"README.md", "spec.yaml", "certificate.json", "model.safetensors"} <= set(os.listdir(target))
    assert not hub.repositories
    assert call("push", RUN, "--to", "alice/sums", "--dry-run", str(target))[0] == 2


@pytest.mark.usefixtures("hub")
def test_the_card_has_the_scores_of_the_pushed_weights_as_a_model_index(call: Call, tmp_path: Path) -> None:
    assert call("push", RUN, "--to", "alice/sums", "--dry-run", str(tmp_path / "card"))[0] == 0
    results = ModelCard.load(tmp_path / "card" / "README.md").data.eval_results
    assert results is not None
    by_name = {result.metric_name: result for result in results}
    (mean,) = (result for name, result in by_name.items() if name.startswith("mean@"))
    assert (mean.task_type, mean.dataset_name, mean.metric_type) == ("text-generation", "sums", "accuracy")
    assert mean.metric_value == 0.875
    assert mean.metric_args["ci_low"] < 0.875 < mean.metric_args["ci_high"]
    assert mean.metric_args["confidence"] == 0.95
    assert {name.partition("@")[0] for name in by_name} == {"mean", "pass", "maj"}


@pytest.mark.more
@pytest.mark.parametrize(
    ("token", "broken", "code", "why"),
    [
        ("", "", 2, "there is no token for http://"),
        (READ_ONLY, "", 2, "denies alice/sums: "),
        ("hf_of_nobody", "", 2, "denies alice/sums: "),
        (TOKEN, "upload", 1, "nothing was pushed to http://"),
        (TOKEN, "commit", 1, "which failed with 500: "),
        (TOKEN, "commit delete", 1, "may still exist, empty: `hf repos delete alice/sums` removes it"),
    ],
)
def test_what_keeps_a_model_from_the_hub_is_said_and_nothing_arrives(
    hub: LocalHub, call: Call, monkeypatch: pytest.MonkeyPatch, token: str, broken: str, code: int, why: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    hub.broken = set(broken.split())
    got, out, err = call("push", RUN, "--to", "alice/sums")
    assert (got, out, why in err) == (code, "", True), err
    assert "hf repos delete" not in err or "delete" in hub.broken
    assert list(hub.repositories) == (["alice/sums"] if "delete" in hub.broken else [])
    assert all(not there.files for there in hub.repositories.values())


def test_an_empty_repository_that_was_there_before_is_left_alone_where_a_push_fails(hub: LocalHub, call: Call) -> None:
    hub.repositories["alice/sums"] = Repository(private=True)
    hub.broken = {"commit"}
    assert call("push", RUN, "--to", "alice/sums")[0] == 1
    assert list(hub.repositories) == ["alice/sums"]


def test_a_hub_that_is_not_there_is_said(call: Call, hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.shutdown()
    hub.server_close()
    code, _, err = call("push", RUN, "--to", "alice/sums")
    assert (code, "nothing was pushed to http://" in err) == (1, True), err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, err = call("push", RUN, "--to", "alice/sums")
    assert (code, "offline" in err) == (1, True), err


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((RUN, "--to", "not a name"), "--to not a name: "),
        ((RUN, "--to", "not a name", "--dry-run", "never-made"), "--to not a name: "),
        ((RUN, "--to", "alice/sums", "--checkpoint", "3"), "allowed: last, best, 2, 4"),
        (("finished", "--to", "alice/sums"), "`finished` is an experiment of 2 runs"),
        (("waiting", "--to", "alice/sums"), "has no weights: they are exported after the last step of training"),
    ],
)
def test_what_cannot_be_pushed_is_said_before_anything_is_sent(
    call: Call, arguments: tuple[str, ...], why: str
) -> None:
    code, _, err = call("push", *arguments)
    assert (code, why in err) == (2, True), err
