"""`rpg up --systemd`, and what its unit starts: `python -m pipelines.prefect.services.at_boot HOME`."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pipelines.home.home import Home
from pipelines.prefect.server.api import ServiceError, Services, running_services
from pipelines.prefect.services.stack import Wanted, next_port, up
from pipelines.prefect.services.supervisord import write_private
from pipelines.prefect.services.systemd import Unit, lasting
from specs.errors import RpgError
from specs.machine.files import read_json


def install(home: Home, wanted: Wanted, *, say: Callable[[str], None] = lambda _: None) -> Services | None:
    """Writes the unit and what it starts, and has the manager start it. The port is the same at each boot.

    Args:
        say: is given a line before each thing that takes a while.
    Returns:
        What is up; None where no manager answers, so that nothing has been started.
    Raises:
        RpgError: the unit cannot be written.
        ServiceError: something is up that no unit has started, or the unit does not start.
    """
    unit = Unit(home)
    is_managed = unit.is_managed()
    services = running_services(home)
    if is_managed and services is not None and not unit.is_active():
        raise ServiceError(f"{services.dashboard} was not started by systemd; `rpg down`, then `rpg up --systemd`")
    home.create()
    if not (is_managed and services):
        _write_wanted(home, wanted, services)
    unit.write()
    if not is_managed:
        return None
    say(f"starting {unit.name}")
    unit.start()
    return up(home, wanted, say=say)


def _write_wanted(home: Home, wanted: Wanted, services: Services | None) -> None:
    """Writes what `main` reads: what is not asked for is as before, or as it is up now."""
    before = _read_wanted(home)
    fixed = Wanted(
        wanted.port or before.port or (services.port if services else next_port(home)),
        wanted.profile or before.profile or (services.profile if services else "embedded"),
        wanted.workers or before.workers or 1,
    )
    fields = {"wanted": dataclasses.asdict(fixed), "directory": os.getcwd(), "environment": lasting(os.environ)}
    home.services.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(_file(home), json.dumps(fields, indent=1))


def _read_wanted(home: Home) -> Wanted:
    return Wanted(**read_json(_file(home)).get("wanted", {}))


def _file(home: Home) -> Path:
    return home.services / "at-boot.json"


def main() -> None:
    """Starts what was asked for, in the environment and the directory in which that was, and leaves it running."""
    home = Home(Path(sys.argv[1]))
    told = read_json(_file(home))
    if not told:
        sys.exit(f"{_file(home)} is missing or damaged: `rpg up --systemd` writes it")
    os.environ.update(told["environment"])
    os.environ["RPG_HOME"] = str(home.root)
    os.chdir(told["directory"])
    try:
        services = up(home, _read_wanted(home), say=lambda line: print(line, flush=True))
    except RpgError as error:
        sys.exit(str(error))
    print(services.dashboard)


if __name__ == "__main__":
    main()
