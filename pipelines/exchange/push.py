"""A run's model as a repository on a Hub: its weights, a card that describes them, and the spec that made them."""

import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipelines.exchange.account import Account, account_of, render
from pipelines.home.home import Home
from pipelines.planning.weights import most_accurate
from specs.errors import RpgError
from specs.machine.files import files_under, read_json
from specs.machine.manifests import find_damage
from specs.records import EVALUATION
from specs.schema.data import Source
from storage import Store

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, HfApi

    from specs.schema.experiment import Experiment

_DENIED = (401, 403)
_OF_AN_EMPTY_REPOSITORY = {".gitattributes"}
"""Files that the Hub puts into a new repository."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class PushError(RpgError):
    """Error for a model that cannot be pushed to this repository, or not at all. Nothing was sent."""


class NotSentError(Exception):
    """Error raised if the Hub is unreachable or fails; its content is unchanged."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """A commit on a Hub."""

    repo: str
    """NAMESPACE/NAME."""
    private: bool
    url: str
    """URL of the commit."""


@dataclass(frozen=True, slots=True)
class Model:
    """The weights of a run after a step, ready to be pushed."""

    account: Account
    weights: Path
    """A directory that transformers loads."""
    base_license: str
    """License of the base model, as its card states; empty if unknown."""
    scores: tuple[tuple[str, str, float, float, float], ...] = ()
    """Dataset, metric, value and interval of each measure of these weights."""

    def texts(self, repo: str) -> dict[str, str]:
        """Returns the files beside the weights, by name: card, spec and certificate.

        Args:
            repo: the Hub's name of the model.
        """
        texts = {"README.md": self._card(repo), "spec.yaml": self.account.spec}
        certificate = self.account.run.path / "certificate.json"
        return texts | ({"certificate.json": certificate.read_text(encoding="utf-8")} if certificate.is_file() else {})

    def files(self) -> dict[str, Path]:
        """Returns the files of the weights, by their names in the repository. An adapter's files are in `adapter/`."""
        return {str(file.relative_to(self.weights)): file for file in _published(self.weights)}

    def write(self, directory: Path, repo: str) -> None:
        """Writes everything that `send` would send into an empty directory."""
        for name, source in self.files().items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, directory / name)
        for name, text in self.texts(repo).items():
            (directory / name).write_text(text, encoding="utf-8")

    def _card(self, repo: str) -> str:
        from huggingface_hub import ModelCardData

        spec, title = self.account.run.spec, repo.rpartition("/")[2]
        has_adapter = (self.weights / "adapter").is_dir()
        base = _hub_id(spec.model.path) if spec.model.source == "pretrained" else ""
        datasets = list(dict.fromkeys(id for source in spec.data.train if (id := _hub_id(_dataset(source)))))
        data = ModelCardData(
            base_model=base or None,
            base_model_relation="finetune" if base else None,
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=[
                "reinforcement-learning",
                "regularized-policy-gradient",
                spec.objective.type.replace("_", "-"),
                *(["lora"] if has_adapter else []),
            ],
            datasets=datasets or None,
            license=self.base_license or None,
            model_name=title,
            eval_results=_results(spec, self.scores) or None,
        )
        text = render("card.md", self.account, title=title, repo=repo, has_adapter=has_adapter)
        return f"---\n{data.to_yaml()}\n---\n\n{text}"


def model_of(home: Home, run_id: str, checkpoint: str) -> Model:
    """Returns the model of a run.

    Args:
        checkpoint: `last`; `best`, the most accurate of the exported steps, as `most_accurate` chooses; or an exported
            step's number.
    Raises:
        PushError: the run has exported no such weights, or they are damaged.
    """
    directory = home.run(run_id)
    exported = {int(path.name.removeprefix("step-")): path for path in sorted(directory.glob("weights/step-*"))}
    if not exported and read_json(directory / "run.json").get("kind") == EVALUATION:
        raise PushError(f"{run_id} evaluated an existing model and has no weights of its own")
    if not exported:
        raise PushError(f"{run_id} has no weights: they are exported after the last step of training")
    step = _step(home, run_id, checkpoint, list(exported))
    weights = exported[step]
    recorded = read_json(directory / "train.json").get("files", {})
    of_step = {name: entry for name, entry in recorded.items() if name.startswith(f"weights/{weights.name}/")}
    if damage := find_damage(directory, of_step):
        raise PushError(f"{run_id} is damaged and is not pushed: {damage}")
    return Model(account_of(home, run_id, step=step), weights, _license(home, run_id), _scores(home, run_id, step))


def _scores(home: Home, run_id: str, step: int) -> tuple[tuple[str, str, float, float, float], ...]:
    query = "SELECT dataset, metric, value, ci_low, ci_high FROM evaluations WHERE run_id = ? AND step = ? ORDER BY ALL"
    with Store.open(home.root) as store:
        return tuple(store.query(query, [run_id, step]).rows)


def _results(spec: "Experiment", scores: Sequence[tuple[str, str, float, float, float]]) -> "list[EvalResult]":
    """Returns scores as entries of a card's `model-index`, each with its interval if it is known."""
    from huggingface_hub import EvalResult

    found, sources = [], {source.name: source for source in spec.data.evaluation}
    for dataset, metric, value, low, high in scores:
        source = sources.get(dataset)
        kind = metric.partition("@")[0]
        ends = {"ci_low": low, "ci_high": high, "confidence": spec.evaluation.confidence}
        if math.isfinite(value):
            found.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=(_hub_id(_dataset(source)) if source else "") or dataset,
                    dataset_name=dataset,
                    metric_type="accuracy" if kind == "mean" else metric,
                    metric_name=metric,
                    metric_value=value,
                    metric_args=ends if math.isfinite(low) and math.isfinite(high) else None,
                )
            )
    return found


def check_name(repo: str) -> None:
    """Raises PushError if the text cannot be the name of a Hub repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise PushError(f"--to {repo}: {error}") from error


def send(model: Model, repo: str, *, private: bool) -> Pushed:
    """Pushes a model in one commit, and creates the repository if it does not exist. HF_ENDPOINT names another Hub.

    Weights of an earlier push that this one does not replace are deleted in the same commit: a loader would load them.
    If the commit fails, a repository that was created for it is deleted again; if that fails, the error says so.

    Raises:
        PushError: no token is set, the Hub denies the repository, or the repository has the other visibility.
        NotSentError: the Hub is unreachable or fails. The content of the repository is unchanged.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # they would leave every intermediate state on the terminal
    api = HfApi(library_name="rpg-experiments")
    if get_token() is None:
        raise PushError(f"there is no token for {api.endpoint}: `hf auth login` stores one, or set HF_TOKEN")
    left = ""
    try:
        repo, is_new = _opened(api, repo, private=private)
        try:
            return Pushed(repo, private, _commit(api, model, repo, private=private))
        except BaseException:
            left = _taken_back(api, repo) if is_new else ""
            raise
    except HfHubHTTPError as error:
        _refused(error, api.endpoint, repo, left)
    except PushError as error:
        raise PushError(f"{error}{left}") from error
    except Exception as error:  # four libraries raise their own classes for a lost network
        reasons = ": ".join(_first_line(each) for each in (error, error.__cause__) if each)
        raise NotSentError(f"nothing was pushed to {api.endpoint}: {reasons}{left}") from error


def _opened(api: "HfApi", repo: str, *, private: bool) -> tuple[str, bool]:
    """Returns the full name of a repository and whether it was created for this push. The given name may lack the
    user's own namespace."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return api.create_repo(repo, private=private).repo_id, True
    except HfHubHTTPError:  # the repository exists; or access is denied, which this call reports again
        return api.create_repo(repo, private=private, exist_ok=True).repo_id, False


def _commit(api: "HfApi", model: Model, repo: str, *, private: bool) -> str:
    """Commits a model to a repository. Returns the commit's URL."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    known = api.model_info(repo)
    if known.private is not private:
        raise PushError(_other_visibility(repo, private))
    additions: dict[str, Path | bytes] = {**model.files()}
    additions |= {name: text.encode() for name, text in model.texts(repo).items()}
    stale = [file.rfilename for file in known.siblings or () if _is_weights(file.rfilename)]
    commit = api.create_commit(
        repo,
        [
            *(CommitOperationAdd(name, content) for name, content in additions.items()),
            *(CommitOperationDelete(name, is_folder=False) for name in stale if name not in additions),
        ],
        commit_message=f"{model.account.run.run_id}, step {model.account.step}",
        parent_commit=known.sha,
    )
    return commit.commit_url


def _taken_back(api: "HfApi", repo: str) -> str:
    """Deletes a repository that was created for a failed commit. Returns a line on what remains; empty if nothing does.

    The commit may have arrived although its response was lost: a repository with files is left alone.
    """
    try:
        files = [file.rfilename for file in api.model_info(repo).siblings or ()]
        if set(files) <= _OF_AN_EMPTY_REPOSITORY:
            api.delete_repo(repo)
            return ""
    except Exception:  # any library may raise here, as above
        return f"\n  {repo} was created for it and may still exist, empty: `hf repos delete {repo}` removes it"
    return f"\n  {repo} contains files nevertheless: the commit may have arrived although its response did not"


def _step(home: Home, run_id: str, checkpoint: str, exported: list[int]) -> int:
    """Returns the exported step that `checkpoint` refers to."""
    if checkpoint == "last":
        return exported[-1]
    if checkpoint == "best":
        if (step := most_accurate(home, run_id, exported)) is None:
            raise PushError(f"--checkpoint best: no exported step of {run_id} was evaluated; `last` is {exported[-1]}")
        return step
    if checkpoint.isdecimal() and int(checkpoint) in exported:
        return int(checkpoint)
    steps = ", ".join(map(str, exported))
    raise PushError(f"--checkpoint {checkpoint}: {run_id} has no such weights\n  allowed: last, best, {steps}")


def _published(directory: Path) -> list[Path]:
    return [file for file in files_under(directory) if not file.name.startswith(".")]


def _hub_id(path: str) -> str:
    """Returns the path if it is the id of a Hub repository and not a directory; else empty."""
    return path if _HUB_ID.fullmatch(path) and not Path(path).exists() else ""


def _dataset(source: Source) -> str:
    return str(getattr(source, "path", "")) if source.source == "hub" else ""


def _license(home: Home, run_id: str) -> str:
    """Returns the license that the base model's own card names; empty if it names none, or a custom one."""
    from huggingface_hub import ModelCard

    fingerprint = read_json(home.run(run_id) / "run.json").get("fingerprints", {}).get("base", "")
    card = home.artifact("base", fingerprint) / "README.md" if fingerprint else None
    if card is None or not card.is_file():
        return ""
    try:
        named = ModelCard(card.read_text(encoding="utf-8")).data.get("license")
    except Exception:  # a card by another author may hold anything
        return ""
    return named if isinstance(named, str) and named != "other" else ""


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json")) or name.startswith("adapter/")


def _other_visibility(repo: str, private: bool) -> str:
    if private:
        return f"{repo} is public, but the push is private: --public pushes it there, or choose another --to"
    return f"{repo} is private, but the push is public: change that on the Hub, or push with --private"


def _refused(error: Any, endpoint: str, repo: str, left: str) -> NoReturn:
    """Raises the error that a response of the Hub stands for.

    Args:
        left: a line on what remains on the Hub; empty if nothing does.
    """
    status, reason = error.response.status_code, error.server_message or _first_line(error)
    if status in _DENIED:
        hint = "the token needs write access to that namespace: `hf auth login`, or HF_TOKEN"
        raise PushError(f"{endpoint} denies {repo}: {reason}\n  hint: {hint}{left}") from error
    if 400 <= status < 500:
        raise PushError(f"{endpoint} does not accept {repo}: {reason}{left}") from error
    raise NotSentError(f"nothing was pushed to {endpoint}, which failed with {status}: {reason}{left}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
