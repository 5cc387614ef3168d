"""Notices of a spec's `notify`, as automations of the Prefect server, which sends the notices."""

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit
from uuid import UUID

from pipelines.prefect.flows.guards import GUARD_EVENT
from specs.errors import Issue, SpecError
from specs.schema.execution import EmailNotice, Notice, Occasion, SlackNotice
from specs.secrets import SecretError, resolved

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

    from specs.document import Document

_EVENTS: dict[Occasion, set[str]] = {
    "failure": {"prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"},
    "completion": {"prefect.flow-run.Completed"},
    "guard": {GUARD_EVENT},
}
_WORDS: dict[Occasion, str] = {"failure": "failed", "completion": "finished", "guard": "a guard acted"}
_MAIL_SCHEMES = {
    "smtp": ("mailto", "insecure"),
    "smtps": ("mailtos", "ssl"),
    "smtp+starttls": ("mailtos", "starttls"),
}
"""Scheme of a mail server's address -> scheme and `mode` for Apprise, the library with which Prefect sends mail."""


def ensure_notices(client: "SyncPrefectClient", document: "Document") -> None:
    """Creates the experiment's automations on the server. They replace those of an earlier submission.

    The addresses are read here, on the machine that submits; Prefect keeps them encrypted.

    Raises:
        SpecError: an address is not on this machine.
    """
    experiment = document.experiment.name
    addresses = [_address(document, number, notice) for number, notice in enumerate(document.experiment.notify)]
    _remove_automations(client, experiment)
    for number, (notice, address) in enumerate(zip(document.experiment.notify, addresses, strict=True)):
        block = _save_block(f"{experiment}-notify-{number}", notice, address)
        for occasion in dict.fromkeys(notice.on):
            client.create_automation(_automation(experiment, number, notice, occasion, block))


def _address(document: "Document", number: int, notice: Notice) -> str:
    """Returns the secret address that a notice of the spec refers to."""
    field = "server" if isinstance(notice, EmailNotice) else "url"
    reference = getattr(notice, field)
    path = ("notify", number, field)
    try:
        address = resolved({field: reference})[field]
    except SecretError as error:
        hint = "the submitting machine reads the address: set the variable, or create the file, here"
        raise SpecError(document.locate(Issue(str(error), path, given=reference, hint=hint))) from None
    scheme = urlsplit(address).scheme
    allowed = tuple(_MAIL_SCHEMES) if isinstance(notice, EmailNotice) else ("http", "https")
    if scheme not in allowed:
        allowed_text = ", ".join(f"{scheme}://..." for scheme in allowed)
        issue = Issue("the address is not an allowed kind of URL", path, given=reference, allowed=allowed_text)
        raise SpecError(document.locate(issue))
    return address


def _tag(experiment: str) -> str:
    return f"experiment:{experiment}"


def _remove_automations(client: "SyncPrefectClient", experiment: str) -> None:
    """Removes the experiment's automations, and the addresses that they use."""
    from prefect.events.filters import AutomationFilter, AutomationFilterTags
    from prefect.exceptions import ObjectNotFound

    tagged = AutomationFilter(tags=AutomationFilterTags(all_=["rpg", _tag(experiment)]))
    blocks: set[UUID] = set()
    for automation in client.read_automations(automations=tagged):
        client.delete_automation(automation.id)
        blocks |= {action.block_document_id for action in automation.actions if hasattr(action, "block_document_id")}
    for block in blocks:
        try:
            client.delete_block_document(block)
        except ObjectNotFound:  # Somebody removed it on the dashboard.
            continue


def _save_block(name: str, notice: Notice, address: str) -> UUID:
    """Saves an address on the server, encrypted. Returns its id."""
    from prefect.blocks.notifications import SlackWebhook
    from prefect.blocks.webhook import Webhook
    from pydantic import SecretStr

    block: Any = Webhook(url=SecretStr(address), headers={"Content-Type": "application/json"})
    if isinstance(notice, EmailNotice):
        # Prefect has no block of its own for a mail server. This one takes any address that Apprise knows.
        block = SlackWebhook(url=SecretStr(_apprise_address(notice, address)))
    saved: UUID = block.save(name, overwrite=True, _sync=True)
    return saved


def _apprise_address(notice: EmailNotice, server: str) -> str:
    """Returns a mail server's address with sender and receivers, as Apprise writes it."""
    parts = urlsplit(server)
    scheme, mode = _MAIL_SCHEMES[parts.scheme]
    options = {"smtp": parts.hostname, "mode": mode, "from": notice.sender, "to": ",".join(notice.to)}
    return f"{scheme}://{parts.netloc}?{urlencode(options)}"


def _automation(experiment: str, number: int, notice: Notice, occasion: Occasion, block: UUID) -> Any:
    """Returns the automation that sends one notice on one occasion."""
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    trigger = EventTrigger(
        expect=_EVENTS[occasion],
        match_related={"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{_tag(experiment)}"},
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
    )
    return AutomationCore(
        name=f"{experiment}: {occasion} by {notice.type} {number}",
        description=f"From `notify` in the spec of {experiment}, at its last submission.",
        tags=["rpg", _tag(experiment)],
        trigger=trigger,
        actions=[_action(experiment, notice, occasion, block)],
    )


def _action(experiment: str, notice: Notice, occasion: Occasion, block: UUID) -> Any:
    """Returns the server's action on the occasion. The texts are Jinja templates, which the server fills in."""
    from prefect.events.actions import CallWebhook, SendNotification

    message = "event.payload.message" if occasion == "guard" else "(flow_run.state.message or '')"
    link = "(flow_run|ui_url or '')"
    if isinstance(notice, EmailNotice):
        subject = f"{{{{ flow_run.name }}}}: {_WORDS[occasion]}"
        return SendNotification(
            block_document_id=block, subject=subject, body=f"{subject}: {{{{ {message} }}}}\n\n{{{{ {link} }}}}"
        )
    if isinstance(notice, SlackNotice):
        text = f"flow_run.name ~ ': {_WORDS[occasion]}: ' ~ {message} ~ ' ' ~ {link}"
        return CallWebhook(block_document_id=block, payload=_json_template(text=text))
    payload = _json_template(
        event=f"'{occasion}'", experiment=f"'{experiment}'", run="flow_run.name", message=message, link=link
    )
    return CallWebhook(block_document_id=block, payload=payload)


def _json_template(**expressions: str) -> str:
    """Returns a template of a JSON object: key -> a Jinja expression for its value."""
    fields = [f"{json.dumps(key)}: {{{{ ({expression})|tojson }}}}" for key, expression in expressions.items()]
    return "{" + ", ".join(fields) + "}"
