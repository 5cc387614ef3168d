"""optuna-dashboard over every study of the home: `python -m pipelines.studies.web PORT`, as `rpg up` starts it.

optuna-dashboard opens one storage, and the home has a journal for each study: they are read here as one storage, which
refuses to write. With RPG_STUDIES_URL it is the database.
"""

import os
import sys
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, NoReturn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import optuna
from bottle import HTTPError
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from optuna_dashboard import wsgi

from pipelines.home.home import Home
from pipelines.prefect.server.credentials import (
    PASSWORDS_VARIABLE,
    SERVER_AUTH_VARIABLE,
    Accepts,
    asked_for,
    shown_in,
)
from pipelines.prefect.server.door import objection
from pipelines.prefect.server.settings import trusted_hosts
from pipelines.studies.samplers import optuna_inside
from pipelines.studies.storage import JOURNAL, URL, open_database
from specs.errors import Issue, RpgError, SpecError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from optuna.study._frozen import FrozenStudy

_IDS = 10**9
"""Between the ids of two storages. Those of nine million storages are whole numbers to a browser, too."""


class Journals:
    """The journals of a home, each opened once."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._opened: dict[str, tuple[bytes, JournalStorage]] = {}
        """First line and storage of each study's journal, in the order of `storages`."""
        self._lock = threading.Lock()

    def storages(self) -> list[BaseStorage]:
        """One for each study, in the order of their creation. Studies made since the last call come last.

        A journal that was deleted keeps its place; a new one of the same study gets it.
        """
        with self._lock:
            new = []
            for path in self._home.root.glob(f"studies/*/{JOURNAL}"):
                name = path.parent.name
                try:
                    with path.open("rb") as file:
                        first_line = file.readline()  # no two journals have the same: it has a random id
                    if name in self._opened and self._opened[name][0] == first_line:
                        continue
                    # No lock is given: who only reads takes none.
                    storage = JournalStorage(JournalFileBackend(str(path)))
                except (OSError, ValueError):
                    continue  # deleted this very moment, or damaged
                created = [str(study.user_attrs.get("created_at", "")) for study in storage.get_all_studies()]
                if created:
                    new.append((max(created), name, first_line, storage))
            for _, name, first_line, storage in sorted(new, key=lambda journal: journal[:2]):
                self._opened[name] = first_line, storage
            return [storage for _, storage in self._opened.values()]


def _refuse(*_arguments: Any, **_named: Any) -> NoReturn:
    raise HTTPError(403, "studies are only shown here; `rpg study` changes them")


class ReadOnlyStorage(BaseStorage):
    """Several storages as one that can only be read.

    The id of a study or a trial is its id in its own storage, plus 10^9 times that storage's place in the list.
    """

    def __init__(self, storages: Callable[[], Sequence[BaseStorage]]) -> None:
        """`storages` is asked at each access. A storage's place in what it returns never changes."""
        self._storages = storages

    create_new_study = delete_study = set_study_user_attr = set_study_system_attr = _refuse
    create_new_trial = set_trial_param = set_trial_state_values = set_trial_intermediate_value = _refuse
    set_trial_user_attr = set_trial_system_attr = _refuse

    def get_all_studies(self) -> "list[FrozenStudy]":
        """Studies of every storage that can be read."""
        studies = []
        for place, storage in enumerate(self._storages()):
            try:
                own = storage.get_all_studies()
            except (OSError, ValueError):
                continue  # a journal that was deleted, or is damaged, hides no other
            for study in own:
                studies.append(optuna_inside.study_moved(study, place * _IDS))
        return studies

    def get_study_id_from_name(self, study_name: str) -> int:
        """The id of the first study of that name. Raises KeyError where there is none."""
        for study in self.get_all_studies():
            if study.study_name == study_name:
                return optuna_inside.study_id(study)
        raise KeyError(study_name)

    def get_study_name_from_id(self, study_id: int) -> str:
        """Raises KeyError where there is no such study."""
        storage, own = self._owner(study_id)
        return storage.get_study_name_from_id(own)

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """Raises KeyError where there is no such study."""
        storage, own = self._owner(study_id)
        return storage.get_study_directions(own)

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """Raises KeyError where there is no such study."""
        storage, own = self._owner(study_id)
        return storage.get_study_user_attrs(own)

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """Raises KeyError where there is no such study."""
        storage, own = self._owner(study_id)
        return storage.get_study_system_attrs(own)

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Raises KeyError where there is no such trial."""
        storage, own = self._owner(trial_id)
        return optuna_inside.trial_moved(storage.get_trial(own), trial_id - own)

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Raises KeyError where there is no such study."""
        storage, own = self._owner(study_id)
        trials = storage.get_all_trials(own, deepcopy, states)
        return [optuna_inside.trial_moved(trial, study_id - own) for trial in trials]

    def _owner(self, number: int) -> tuple[BaseStorage, int]:
        """The storage of a study's or a trial's id, and the id there. Raises KeyError where there is none."""
        place, own = divmod(number, _IDS)
        storages = self._storages()
        if place >= len(storages):
            raise KeyError(number)
        return storages[place], own


class _Server(ThreadingMixIn, WSGIServer):
    """A browser opens connections ahead that it does not use yet: each has a thread of its own."""

    daemon_threads = True


class _Handler(WSGIRequestHandler):
    """Logs errors alone: an open page asks every few seconds."""

    def log_request(self, *_status: object) -> None:
        pass


def studies_storage(home: Home) -> ReadOnlyStorage:
    """Every study of the home, or of the database of RPG_STUDIES_URL.

    Raises:
        SpecError: RPG_STUDIES_URL names no PostgreSQL database, or its driver is not installed.
        StudyStorageError: the database does not answer.
    """
    if url := os.environ.get(URL, ""):
        database, _ = open_database(url)
        return ReadOnlyStorage(lambda: [database])
    return ReadOnlyStorage(Journals(home).storages)


def guarded(application: "WSGIApplication", accepts: Accepts, *, is_named: bool = False) -> "WSGIApplication":
    """The application, `/ready`, and HTTP basic authentication, which only `/ready` goes without.

    Args:
        accepts: which passwords open.
        is_named: requests under a name that is none of this server's, and of other origins, are turned away.
    """

    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/ready":
            start_response("200 OK", [("content-type", "text/plain")])
            return [b"ready"]
        asked = environ.get("HTTP_HOST", ""), environ.get("HTTP_ORIGIN", "")
        if is_named and (reason := objection(*asked, ())):
            start_response("403 Forbidden", [("content-type", "text/plain")])
            return [reason.encode()]
        if not accepts(shown_in(environ.get("HTTP_AUTHORIZATION", ""))):
            start_response("401 Unauthorized", [("www-authenticate", 'Basic realm="rpg"')])
            return [b"log in with the auth string of the Prefect server, or of its readers"]
        return application(environ, start_response)

    return answer


def serve(home: Home, host: str, port: int) -> None:
    """Answers until it is ended. It asks for the passwords that the environment names; see `asked_for`.

    Raises:
        SpecError: the environment names none. On loopback, too, other users and browsers' pages reach it.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    accepts, is_local = asked_for(home), host == "127.0.0.1"
    if not accepts:
        hint = f"set {SERVER_AUTH_VARIABLE}=user:password, or {PASSWORDS_VARIABLE}=home for those of `rpg up`"
        raise SpecError(Issue("others could read every study, without a password", hint=hint))
    is_named = is_local or bool(trusted_hosts())
    application = guarded(wsgi(studies_storage(home)), accepts, is_named=is_named)
    with make_server(host, port, application, server_class=_Server, handler_class=_Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    try:
        serve(Home.from_environment(), os.environ.get("RPG_WEB_HOST") or "127.0.0.1", int(sys.argv[1]))
    except RpgError as error:
        sys.exit(str(error))
