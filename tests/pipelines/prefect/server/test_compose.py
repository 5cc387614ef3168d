"""docker-compose.yml, without Docker: valid, safe, and told the same settings as `rpg up --profile server`."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from live import SPEC
from places import ROOT
from ruamel.yaml import YAML

from pipelines.home.home import Home
from pipelines.prefect.flows.workers import flow_process
from pipelines.prefect.server.settings import API_ONLY, client_environment, server_environment
from pipelines.processes.stop import GIVE_BACK_SECONDS

SERVER = ("migrate", "server", "services")
BACKENDS = {"postgres", "redis"}
WORKERS = ("worker", "gpu-worker")


REGISTERS = "PREFECT_SERVER_REGISTER_BLOCKS_ON_START"


def filled_in(value: str, **given: str) -> str:
    """A value of the file as Compose passes it on: what names a variable becomes that or its default."""
    while (found := re.search(r"\$\{(\w+):-([^${}]*)\}", value)) is not None:
        value = value.replace(found[0], given.get(found[1]) or found[2])
    return value


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe").load(ROOT / "docker-compose.yml")
    return loaded


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What docker/make-secrets writes, by name."""
    directory = tmp_path_factory.mktemp("compose") / "secrets"
    subprocess.run([str(ROOT / "docker/make-secrets"), str(directory)], check=True, timeout=60)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    return {path.name: path.read_text().strip() for path in directory.iterdir()}


def test_the_file_is_a_valid_compose_file() -> None:
    checker = Path(sys.executable).with_name("check-jsonschema")
    command = [str(checker), "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_image_is_pinned_to_a_version(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        tag = service["image"].partition("@")[0].rpartition(":")[2]
        assert tag.count(".") >= 1, f"{name}: {service['image']}"
        assert "latest" not in tag, name


def test_whatever_is_no_database_is_our_own_image(compose: dict[str, Any]) -> None:
    others = {name for name, service in compose["services"].items() if "build" not in service}
    assert others == BACKENDS


def test_no_service_is_root_or_may_become_it(compose: dict[str, Any]) -> None:
    ours = (ROOT / "docker/Dockerfile").read_text()
    for name, service in compose["services"].items():
        if "build" in service:
            stage = ours.split(f" AS {service['build']['target']}\n")[1].split("\nFROM ")[0]
            assert "\nUSER rpg\n" in stage, name
        else:
            assert service["user"].split(":")[0] not in ("", "0", "root"), name
        assert service["cap_drop"] == ["ALL"], name
        sandboxed = ["seccomp:docker/worker-seccomp.json", "apparmor:unconfined"] if name in WORKERS else []
        assert service["security_opt"] == ["no-new-privileges:true", *sandboxed], name


FILTER = """
import ctypes, errno, json, os, sys

class Argument(ctypes.Structure):
    _fields_ = [("index", ctypes.c_uint), ("op", ctypes.c_int), ("value", ctypes.c_uint64), ("second", ctypes.c_uint64)]

seccomp = ctypes.CDLL("libseccomp.so.2")
seccomp.seccomp_init.restype = ctypes.c_void_p
profile = json.load(open("docker/worker-seccomp.json"))
actions = {"SCMP_ACT_ALLOW": 0x7FFF0000, "SCMP_ACT_ERRNO": 0x00050000}
operators = {"SCMP_CMP_LT": 2}
default = ctypes.c_uint32(actions[profile["defaultAction"]] | profile["defaultErrnoRet"])
made = ctypes.c_void_p(seccomp.seccomp_init(default))
for rule in profile["syscalls"]:
    compared = [Argument(each["index"], operators[each["op"]], each["value"]) for each in rule.get("args", ())]
    for name in rule["names"]:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        assert number >= 0, name
        action = ctypes.c_uint32(actions[rule["action"]])
        given = (Argument * len(compared))(*compared)
        assert seccomp.seccomp_rule_add_array(made, action, number, len(compared), given) == 0, name
assert seccomp.seccomp_load(made) == 0
"""
REFUSED = """
libc = ctypes.CDLL(None, use_errno=True)
for name in sys.argv[1:]:
    assert libc.syscall(seccomp.seccomp_syscall_resolve_name(name.encode()), 0, 0, 0, 0, 0) == -1, name
    assert ctypes.get_errno() == errno.ENOSYS, name
assert libc.syscall(1000) == -1 and ctypes.get_errno() == errno.ENOSYS
assert libc.socket(38, 5, 0) == -1 and ctypes.get_errno() == errno.ENOSYS, "the kernel's ciphers"
os.geteuid = lambda: 1000  # in the way of an ordinary user
from rpg.sandbox import missing
from rpg.sandbox.bubblewrap import _way
print(missing() or _way().nobody)
from rpg.sandbox import Limits, Program, Sandbox
with Sandbox(Limits(processes=16, memory_bytes=4 << 30), at_once=1) as sandbox:
    python = sandbox.run(Program("print(6 * 7)"))
    compiled = sandbox.run(Program("#include <cstdio>\\nint main() { std::puts(\\"42\\"); }", language="c++"))
    print(python.stdout == compiled.stdout == "42\\n" or (python, compiled))
"""
NOT_NAMED = (
    *("keyctl", "add_key", "request_key", "bpf", "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd"),
    *("kexec_load", "kexec_file_load", "open_by_handle_at", "userfaultfd", "perf_event_open", "setns", "init_module"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "fsopen", "move_mount", "mount_setattr", "reboot"),
    *("clock_settime", "settimeofday", "swapon", "quotactl", "acct", "syslog", "fanotify_init", "kcmp", "mbind"),
)


def under_the_filter(program: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    from ctypes.util import find_library

    if not find_library("seccomp"):
        pytest.skip("no libseccomp here")
    command = [sys.executable, "-c", FILTER + program, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False, **options)


@pytest.mark.needs("bubblewrap")
def test_the_workers_filter_denies_each_call_that_it_does_not_name_and_lets_them_make_a_sandbox(
    compose: dict[str, Any],
) -> None:
    done = under_the_filter(REFUSED, *NOT_NAMED)
    confined, ran = done.stdout.splitlines()[-2:] if done.returncode == 0 else ("", "")
    assert (ran, confined) == ("True", "False"), done.stdout + done.stderr
    profile = json.loads((ROOT / "docker/worker-seccomp.json").read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert not {*NOT_NAMED} & {name for rule in profile["syscalls"] for name in rule["names"]}
    stages = (ROOT / "docker/Dockerfile").read_text().split("\nFROM ")
    assert all("bubblewrap" in stage for stage in stages if "apt-get install" in stage)
    for name in WORKERS:
        assert (ROOT / compose["services"][name]["security_opt"][1].partition(":")[2]).is_file()


@pytest.mark.long
def test_a_training_runs_under_the_workers_filter(tmp_path: Path) -> None:
    spec = tmp_path / "tiny.yaml"
    spec.write_text(SPEC.replace("reward: {type: exact_match}", "reward: {type: reasoning_gym}"))
    program = "from pipelines.cli import main; main()"
    environment = os.environ | {"RPG_HOME": str(tmp_path / "home")}
    done = under_the_filter(program, "run", str(spec), "--set", "training.steps=2", env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_service_says_when_it_is_healthy_and_takes_no_more_than_its_share(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert {"cpus", "memory"} <= service["deploy"]["resources"]["limits"].keys(), name
        if name != "migrate":  # it ends
            assert service["healthcheck"]["retries"] < 20, name


def test_what_waits_waits_for_a_service_that_is_healthy_or_done(compose: dict[str, Any]) -> None:
    services = compose["services"]
    waits = {name: set(service.get("depends_on", {})) for name, service in services.items()}
    assert waits["migrate"] == {"postgres"}
    assert waits["server"] == waits["services"] == {"migrate", "redis"}
    assert all(waits[name] == {"server"} for name in (*WORKERS, "studies", "record"))
    for service in services.values():
        for needed, how in service.get("depends_on", {}).items():
            done = needed == "migrate"
            assert how == {"condition": "service_completed_successfully" if done else "service_healthy"}


def test_workers_of_a_machine_share_the_home_the_models_and_the_leases_of_gpus(compose: dict[str, Any]) -> None:
    services = compose["services"]
    mounted = {mount.split(":")[0] for service in services.values() for mount in service.get("volumes", [])}
    assert mounted == set(compose["volumes"])
    made = (ROOT / "docker/Dockerfile").read_text()
    for name in WORKERS:
        environment = services[name]["environment"]
        volumes = dict(mount.split(":") for mount in services[name]["volumes"])
        expected = {"rpg-home": "RPG_HOME", "huggingface": "HF_HOME", "gpu-slots": "RPG_SLOT_DIR"}
        assert volumes == {volume: environment[variable] for volume, variable in expected.items()}
        assert all(path in made for path in volumes.values()), "a new volume gets its owner from the image"
    (device,) = services["gpu-worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", "all", ["gpu"])
    assert services["gpu-worker"]["profiles"] == ["gpu"]


def test_the_page_of_the_record_cannot_write_into_the_home(compose: dict[str, Any]) -> None:
    assert compose["services"]["record"]["volumes"] == ["rpg-home:/var/lib/rpg:ro"]


def test_a_worker_has_the_time_to_give_its_runs_back(compose: dict[str, Any]) -> None:
    for name in WORKERS:
        minutes = int(compose["services"][name]["stop_grace_period"].removesuffix("m"))
        assert 60 * minutes > GIVE_BACK_SECONDS + flow_process._CLOSING_SECONDS


def test_nothing_is_published_beyond_this_machine(compose: dict[str, Any]) -> None:
    ports = {name: service["ports"] for name, service in compose["services"].items() if "ports" in service}
    assert ports.keys() == {"server", "studies", "record"}
    assert all(port.startswith("127.0.0.1:") for published in ports.values() for port in published)


def test_every_secret_is_a_file_that_is_made_and_no_password_stands_in_the_file(
    compose: dict[str, Any], secrets: dict[str, str]
) -> None:
    assert {Path(entry["file"]).name for entry in compose["secrets"].values()} == secrets.keys()
    used = {
        entry if isinstance(entry, str) else entry["source"]
        for service in compose["services"].values()
        for entry in service.get("secrets", [])
    }
    assert used == secrets.keys()
    for service in compose["services"].values():
        for variable, value in service.get("environment", {}).items():
            assert "PASSWORD" not in variable or value.startswith("/run/secrets/")
            assert "@" not in str(value)
    assert "docker/secrets/" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_servers_processes_are_told_what_rpg_up_tells_them(
    compose: dict[str, Any], secrets: dict[str, str], tmp_path: Path
) -> None:
    """Except for passwords, addresses and places, which the test sets to the same values on both sides."""
    database = secrets["PREFECT_SERVER_DATABASE_CONNECTION_URL"].removeprefix("postgresql+asyncpg://")
    redis = secrets["PREFECT_REDIS_MESSAGING_URL"].removeprefix("redis://").removesuffix("/0")
    auth_string = secrets["PREFECT_API_AUTH_STRING"]
    url = "http://localhost:4200/api"
    here = server_environment(Home(tmp_path), url, database=database, redis=redis, auth_string=auth_string)
    of_places = client_environment(Home(tmp_path), url).keys() - {"PREFECT_CLI_PROMPT", "DO_NOT_TRACK"}
    expected = {name: value for name, value in here.items() if name not in {*of_places, "RPG_HOME"}}
    for name in SERVER:
        service = compose["services"][name]
        environment = {key: filled_in(str(value)) for key, value in service["environment"].items()}
        told = environment | {secret: secrets[secret] for secret in service["secrets"]}
        assert {key: told.get(key) for key in expected} == expected, name
    # As in `ServerProfile`: `migrate` registers the types of blocks, and the API leaves the background services alone.
    assert all(compose["services"][name]["environment"][REGISTERS] == "false" for name in SERVER)
    assert API_ONLY.items() <= compose["services"]["server"]["environment"].items()


def test_a_secret_becomes_the_variable_of_its_name(compose: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "PREFECT_API_AUTH_STRING").write_text("rpg:a b$c\n")
    program, option, script = compose["services"]["worker"]["entrypoint"]
    # Compose writes $$ for $.
    script = script.replace("$$", "$").replace("/run/secrets", str(tmp_path))
    show = [
        sys.executable,
        "-c",
        "import os, json, sys; print(json.dumps([os.environ['PREFECT_API_AUTH_STRING'], sys.argv[1]]))",
    ]
    done = subprocess.run([program, option, script, *show, "two words"], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == ["rpg:a b$c", "two words"], done.stderr


def test_the_worker_is_told_the_servers_address_the_way_it_reads_it(compose: dict[str, Any]) -> None:
    from typer.main import get_command

    from pipelines.cli import app

    for name, pool in zip(WORKERS, ("rpg", "gpu"), strict=True):
        service = compose["services"][name]
        program, verb, *options = service["command"]
        command = get_command(app).commands[verb]  # type: ignore[attr-defined]
        variables = [getattr(option, "envvar", None) for option in command.params]
        assert (program, options) == ("rpg", ["--pool", pool])
        assert service["healthcheck"]["test"][-1] == pool
        assert "RPG_PROFILE" in variables
        assert service["environment"]["RPG_PROFILE"] == "http://server:4200/api"


def test_every_setting_of_the_example_is_one_that_the_file_reads() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    settings = [line.split("=") for line in (ROOT / ".env.example").read_text().splitlines() if line[:1].isalpha()]
    assert settings
    for name, default in settings:
        assert f"${{{name}:-{default}}}" in text, name
    # Those that are a comment have another default than the example.
    commented = re.findall(r"^# ([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.M)
    assert commented == ["RPG_TRUSTED_HOSTS", "PREFECT_SERVER_UI_API_URL"]
    assert all(f"${{{name}:-" in text for name in commented)


def test_what_the_images_copy_is_there() -> None:
    recipe = (ROOT / "docker/Dockerfile").read_text()
    copied = [line.split()[1:-1] for line in recipe.splitlines() if line.startswith("COPY") and "--from" not in line]
    assert copied
    assert not [source for sources in copied for source in sources if not (ROOT / source).exists()]
