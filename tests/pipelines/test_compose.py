import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe").load(ROOT / "docker-compose.yml")
    return loaded


def test_the_file_is_a_valid_compose_file() -> None:
    checker = Path(sys.executable).with_name("check-jsonschema")
    command = [str(checker), "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_image_is_pinned_to_a_version(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        tag = service["image"].rpartition(":")[2]
        assert tag.count(".") >= 1, f"{name}: {service['image']}"
        assert "latest" not in tag, name


def test_prefects_image_is_the_version_that_is_installed_here(compose: dict[str, Any]) -> None:
    import prefect

    for name in ("server", "services"):
        assert compose["services"][name]["image"].startswith(f"prefecthq/prefect:{prefect.__version__}-python3.11")


def test_what_waits_waits_for_a_service_that_says_when_it_is_healthy(compose: dict[str, Any]) -> None:
    services = compose["services"]
    waits = {name: service.get("depends_on", {}) for name, service in services.items()}
    assert set(waits["server"]) == {"postgres", "redis"}
    assert set(waits["services"]) == {"postgres", "redis", "server"}
    assert set(waits["worker"]) == {"server"}
    for needed in waits.values():
        for name, how in needed.items():
            assert how == {"condition": "service_healthy"}
            assert "healthcheck" in services[name]


def test_every_named_volume_is_declared_and_the_runs_lie_on_one(compose: dict[str, Any]) -> None:
    mounted = {mount.split(":")[0] for service in compose["services"].values() for mount in service.get("volumes", [])}
    assert mounted == set(compose["volumes"])
    worker = compose["services"]["worker"]
    assert f"rpg-home:{worker['environment']['RPG_HOME']}" in worker["volumes"]


def test_nothing_is_published_beyond_this_machine(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_prefect_reads_the_servers_settings_as_they_are_meant(compose: dict[str, Any], tmp_path: Path) -> None:
    environment = compose["services"]["server"]["environment"]
    resolved = {name: value.replace("${POSTGRES_PASSWORD:-prefect}", "secret") for name, value in environment.items()}
    code = (
        "from prefect.settings import get_current_settings as g; s = g().server;"
        "print(s.database.connection_url.get_secret_value(), s.events.messaging_broker, s.events.messaging_cache,"
        "s.events.causal_ordering, s.concurrency.lease_storage, s.docket.url.get_secret_value()"
        " if hasattr(s.docket.url, 'get_secret_value') else s.docket.url, s.analytics_enabled, sep='\\n')"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=kept | resolved | {"PREFECT_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "postgresql+asyncpg://prefect:secret@postgres:5432/prefect",
        "prefect_redis.messaging",
        "prefect_redis.messaging",
        "prefect_redis.ordering",
        "prefect_redis.lease_storage",
        "redis://redis:6379/1",
        "False",
    ], done.stderr


def test_the_worker_is_told_the_servers_address_the_way_it_reads_it(compose: dict[str, Any]) -> None:
    from typer.main import get_command

    from pipelines.cli import app

    service = compose["services"]["worker"]
    program, verb = service["command"]
    command = get_command(app).commands[verb]  # type: ignore[attr-defined]
    told = [getattr(option, "envvar", None) for option in command.params]
    assert program == "rpg"
    assert "RPG_PROFILE" in told
    assert service["environment"]["RPG_PROFILE"] == "http://server:4200/api"


def test_what_the_image_copies_is_there(compose: dict[str, Any]) -> None:
    recipe = (ROOT / compose["services"]["worker"]["build"]["dockerfile"]).read_text()
    copied = [line.split()[1:-1] for line in recipe.splitlines() if line.startswith("COPY")]
    missing = [source for sources in copied for source in sources if not (ROOT / source).exists()]
    assert not missing
