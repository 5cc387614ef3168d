"""What a result was computed with."""

from importlib.metadata import version

PACKAGES = ("torch", "transformers", "deepspeed", "numpy", "pyarrow")


def versions() -> dict[str, str]:
    """Installed versions of the packages that shape a result."""
    return {package: version(package) for package in PACKAGES}
