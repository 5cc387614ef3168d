"""Frozen documents on the Prefect server. Each is sent once, and the flow runs made from it refer to its digest.

Every list of flow runs contains their whole parameters, and the server accepts at most 512 KiB of them.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipelines.prefect.server.client import ask_patiently
from specs.errors import Issue, SpecError
from specs.secrets import hide

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_DIGEST = re.compile("[0-9a-f]{64}")
_SHOWN = 80
"""Number of characters that a message shows of a value that is not a digest."""


def digest_of(frozen: Mapping[str, Any]) -> str:
    """Returns the SHA-256, hexadecimal, of a frozen document (`Document.to_json()` or `StudyDocument.to_json()`)."""
    return hashlib.sha256(_text(frozen).encode()).hexdigest()


def send(client: "SyncPrefectClient", frozen: Mapping[str, Any], description: str) -> str:
    """Saves a frozen document as an artifact, unless the server has it. Returns its digest."""
    from prefect.client.schemas.actions import ArtifactCreate

    digest = digest_of(frozen)
    if not _artifacts(client, digest):
        client.create_artifact(
            ArtifactCreate(key=_key(digest), type="document", description=description, data=_text(frozen))
        )
    return digest


def fetch(digest: str) -> dict[str, Any]:
    """Returns the frozen document with this digest, from the server that this process reports to.

    Retries for some minutes if the server is unreachable or fails (an HTTP status from 500).

    Raises:
        SpecError: this is not a digest, or the server does not have the document, or has other content under its name.
    """
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        given = hide(repr(digest))[:_SHOWN]
        raise SpecError(
            Issue("the flow run does not name its frozen spec by a digest", given=given, hint="submit the spec again")
        )
    artifacts = ask_patiently(lambda client: _artifacts(client, digest))
    for artifact in artifacts:
        if isinstance(artifact.data, str) and hashlib.sha256(artifact.data.encode()).hexdigest() == digest:
            frozen: dict[str, Any] = json.loads(artifact.data)
            return frozen
    state = "holds another content" if artifacts else "was deleted from the server"
    raise SpecError(Issue(f"the artifact {_key(digest)}, the frozen spec, {state}", hint="submit the spec again"))


def _artifacts(client: "SyncPrefectClient", digest: str) -> list[Any]:
    from prefect.client.schemas.filters import ArtifactCollectionFilter, ArtifactCollectionFilterKey

    key = ArtifactCollectionFilterKey(any_=[_key(digest)])
    return list(client.read_latest_artifacts(artifact_filter=ArtifactCollectionFilter(key=key)))


def _key(digest: str) -> str:
    return f"document-{digest}"


def _text(frozen: Mapping[str, Any]) -> str:
    return json.dumps(frozen, sort_keys=True, ensure_ascii=False, allow_nan=False)
