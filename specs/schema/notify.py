"""Notices: who is told how the runs of a submitted experiment fare. Nothing here changes a result."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from specs.errors import Issue, IssueError
from specs.schema.base import Spec
from specs.secrets import HIDDEN, is_reference

Occasion = Literal["failure", "completion", "guard"]
"""failure: a run failed or crashed; completion: one finished; guard: a guard of one acted."""


def _reference(value: str) -> str:
    if not is_reference(value):
        allowed = "env:NAME or file:/PATH, read where it is used"
        hint = "a spec is stored and shared; keep it in a variable or a file"
        raise IssueError(
            Issue("a secret's place belongs here, not the secret", (), HIDDEN, allowed, hint, snippet=HIDDEN)
        )
    return value


SecretReference = Annotated[str, AfterValidator(_reference)]
"""Where a secret is: `env:NAME` or `file:/PATH`."""


class _Notice(Spec):
    """Fields of every notice. The Prefect server that the experiment is submitted to sends it; `rpg run` sends none."""

    on: tuple[Occasion, ...] = Field(("failure", "guard"), min_length=1)
    """failure: a run failed or crashed. completion: a run finished. guard: a guard acted."""


class WebhookNotice(_Notice):
    """A POST of JSON: event, experiment, run, message, link."""

    type: Literal["webhook"]
    """webhook: a request to an address of yours."""
    url: SecretReference
    """env:NAME or file:/PATH of the address."""


class SlackNotice(_Notice):
    """A message in a Slack channel."""

    type: Literal["slack"]
    """slack: an incoming webhook of Slack's, or of a service that takes the same."""
    url: SecretReference
    """env:NAME or file:/PATH of the webhook's address."""


class EmailNotice(_Notice):
    """An e-mail."""

    type: Literal["email"]
    """email: through a mail server."""
    server: SecretReference
    """env:NAME or file:/PATH of smtp://HOST:PORT, smtps://USER:PASSWORD@HOST:PORT (TLS from the start) or
    smtp+starttls://USER:PASSWORD@HOST:PORT."""
    sender: str = Field(pattern=r"^[^@\s]+@[^@\s]+$")
    """Address that it comes from."""
    to: tuple[Annotated[str, Field(pattern=r"^[^@\s,]+@[^@\s,]+$")], ...] = Field(min_length=1)
    """Addresses that it goes to."""


Notice = Annotated[WebhookNotice | SlackNotice | EmailNotice, Field(discriminator="type")]
