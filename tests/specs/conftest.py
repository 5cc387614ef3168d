import pytest


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    """Files are named as a user in that directory would name them."""
    monkeypatch.chdir(tmp_path)
