"""docker/Dockerfile, without Docker: exact images, a lock with hashes, and nothing else of the checkout in a layer."""

import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from places import ROOT
from ruamel.yaml import YAML

RECIPE = (ROOT / "docker/Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {"cpu": ["server"], "gpu": ["server", "vllm"]}
LOCKS = ["build", *EXTRAS]
HERE = {
    "python_version": "3.11",
    "python_full_version": "3.11.11",
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
    bases = dict(re.findall(r"^FROM ([\w/]+):(\S+) AS", RECIPE, re.M))
    assert bases.keys() == {"python", "nvidia/cuda"}
    assert all(re.match(r"\d+\.\d+\.\d+-", tag) for tag in bases.values()), bases
    assert bases["python"].split(".")[:2] == ["3", "11"], "for which the locks are written"
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(bases["python"].partition("-")[0])
    assert bases["nvidia/cuda"].split(".")[:2] == lock("gpu")["nvidia-cuda-runtime"].split(".")[:2]
    services = YAML(typ="safe").load(ROOT / "docker-compose.yml")["services"]
    for image in (service["image"] for service in services.values()):
        assert re.search(r":\d+(\.\d+)+", image), image


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
