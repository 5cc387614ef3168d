"""A spec as read in a home: an evaluation names the weights of its runs, a program its own rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pipelines.home.home import Home
    from specs.document import Document
    from specs.loader import Overrides, Spec
    from specs.study_document import StudyDocument


def load(
    spec: Spec, overrides: Overrides, home: Home, rewards: Mapping[str, Callable[..., Any]] | None = None
) -> Document | StudyDocument:
    """Reads an experiment, a study or an evaluation. Raises SpecError with every issue.

    Args:
        rewards: name -> function that scores responses, for the spec's `reward: {type: NAME}`.
    """
    from pipelines.planning.weights import weights_in
    from specs.errors import Issue, SpecError
    from specs.loader import load_any

    written = {}
    if rewards:
        from pipelines.exchange.reward_file import write_rewards

        written = write_rewards(rewards, home)
    document = load_any(spec, overrides, weights_of=weights_in(home), rewards=written)
    for name, reward in written.items():
        if not any(f"'path': {reward['path']!r}" in str(source) for source in _sources(document)):
            issue = Issue(f"no reward of the spec is {name!r}", ("rewards", name), hint=f"reward: {{type: {name}}}")
            raise SpecError(issue)
    return document


def _sources(document: Document | StudyDocument) -> Iterator[dict[str, Any]]:
    from specs.study_document import StudyDocument

    yield document.source
    if isinstance(document, StudyDocument):
        yield document.experiment.source
