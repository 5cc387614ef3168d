"""A Hub on this machine: a server that speaks what huggingface_hub calls to make a repository and to commit to it.

Content of large files comes by Git LFS. A commit is taken whole or not at all.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from ruamel.yaml import YAML

TOKEN, READ_ONLY = "hf_local_writes_here", "hf_local_only_reads"
_REGULAR_BYTES = 10_000
"""Larger files, and weights of any size, go by LFS."""


@dataclass
class Repository:
    """What was committed."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    """Their messages."""

    @property
    def sha(self) -> str:
        """Digest of the last commit."""
        return hashlib.sha1(str(len(self.commits)).encode()).hexdigest()


class LocalHub(ThreadingHTTPServer):
    """The repositories by name, and the large files that were uploaded."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.broken: set[str] = set()
        """Steps that fail: `upload`, `commit`, `delete`."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    """A Hub that serves until the end of the block."""
    hub = LocalHub()
    thread = Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _RefusedError(Exception):
    def __init__(self, status: int, message: str, **content: str) -> None:
        super().__init__(message)
        self.status = status
        self.content = {"error": message} | content


class _Handler(BaseHTTPRequestHandler):
    server: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve(lambda _: self._model(self._of_model("")))

    def do_PUT(self) -> None:
        self._serve(self._upload)

    def do_DELETE(self) -> None:
        self._serve(self._delete)

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            self._serve(self._create)
        elif path == "/api/validate-yaml":
            self._serve(self._validate)
        elif path.endswith("/preupload/main"):
            self._serve(self._preupload)
        elif path.endswith("/info/lfs/objects/batch"):
            self._serve(self._batch)
        elif path.endswith("/commit/main"):
            self._serve(self._commit)
        else:
            self._serve(lambda _: self._none())

    def _serve(self, answer: Any) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if not self.path.startswith("/upload/"):
                self._require_token(writes=self.command in ("POST", "DELETE"))
            status, content = 200, answer(body)
        except _RefusedError as error:
            status, content = error.status, error.content
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _require_token(self, *, writes: bool) -> None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in (TOKEN, READ_ONLY):
            raise _RefusedError(401, "Invalid username or password.")
        if writes and token == READ_ONLY:
            raise _RefusedError(403, "You don't have the rights to create a model under this namespace")

    def _none(self) -> Any:
        raise _RefusedError(404, f"nothing at {self.path}")

    def _of_model(self, suffix: str) -> str:
        return self.path.partition("?")[0].removeprefix("/api/models/").removesuffix(suffix)

    def _repository(self, name: str) -> Repository:
        if name not in self.server.repositories:
            raise _RefusedError(404, f"no repository {name}")
        return self.server.repositories[name]

    def _create(self, body: bytes) -> Any:
        asked = json.loads(body)
        name = f"{asked['organization'] or 'alice'}/{asked['name']}"
        if name in self.server.repositories:
            raise _RefusedError(409, "You already created this model repo", url=f"{self.server.url}/{name}")
        self.server.repositories[name] = Repository(asked["visibility"] == "private")
        return {"url": f"{self.server.url}/{name}", "id": name}

    def _delete(self, body: bytes) -> Any:
        if "delete" in self.server.broken:
            raise _RefusedError(500, "the database is out of order")
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        self._repository(name)
        del self.server.repositories[name]
        return {}

    def _model(self, name: str) -> Any:
        repository = self._repository(name)
        siblings = [{"rfilename": file} for file in sorted(repository.files)]
        return {"id": name, "sha": repository.sha, "private": repository.private, "siblings": siblings, "tags": []}

    def _validate(self, body: bytes) -> Any:
        """Checks what the Hub checks: the metadata is YAML, and its fields have their types."""
        content = json.loads(body)["content"]
        metadata = YAML(typ="safe").load(content.split("---\n")[1])
        texts, lists = ("library_name", "pipeline_tag", "license", "base_model_relation"), ("tags", "datasets")
        wrong = [name for name in texts if not isinstance(metadata.get(name, ""), str)]
        wrong += [name for name in lists if not all(isinstance(item, str) for item in metadata.get(name, []))]
        if wrong:
            raise _RefusedError(400, f"wrong metadata: {wrong}")
        return {"errors": [], "warnings": []}

    def _preupload(self, body: bytes) -> Any:
        return {
            "files": [
                {
                    "path": file["path"],
                    "shouldIgnore": False,
                    "uploadMode": "lfs"
                    if file["size"] > _REGULAR_BYTES or file["path"].endswith(".safetensors")
                    else "regular",
                }
                for file in json.loads(body)["files"]
            ]
        }

    def _batch(self, body: bytes) -> Any:
        objects = []
        for wanted in json.loads(body)["objects"]:
            upload = {"upload": {"href": f"{self.server.url}/upload/{wanted['oid']}", "header": {}}}
            there = wanted["oid"] in self.server.large
            objects.append({**wanted, **({} if there else {"actions": upload})})
        return {"transfer": "basic", "objects": objects}

    def _upload(self, body: bytes) -> Any:
        if "upload" in self.server.broken:
            raise _RefusedError(400, "the storage is out of order")
        oid = self.path.removeprefix("/upload/")
        if hashlib.sha256(body).hexdigest() != oid:
            raise _RefusedError(400, "another content than was announced")
        self.server.large[oid] = body
        return {}

    def _commit(self, body: bytes) -> Any:
        if "commit" in self.server.broken:
            raise _RefusedError(500, "the database is out of order")
        name = self._of_model("/commit/main")
        repository = self._repository(name)
        files = dict(repository.files)
        message = ""
        for line in body.splitlines():
            kind, value = json.loads(line)["key"], json.loads(line)["value"]
            match kind:
                case "header":
                    message = value["summary"]
                    if value.get("parentCommit", repository.sha) != repository.sha:
                        raise _RefusedError(412, "A commit has happened since")
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    if value["oid"] not in self.server.large:
                        raise _RefusedError(400, f"{value['path']} was not uploaded")
                    files[value["path"]] = self.server.large[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        repository.files = files
        repository.commits.append(message)
        return {"commitUrl": f"{self.server.url}/{name}/commit/{repository.sha}", "commitOid": repository.sha}
