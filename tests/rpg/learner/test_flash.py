"""Which flash attention is chosen for packed rows; the kernels themselves need a GPU."""

import inspect
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch.nn import attention

from rpg.learner import packing
from rpg.learner.packing import NEWER_FLASH, activate_if_right, newer_flash, use_newer_flash

CPU = torch.device("cpu")


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Empty modules in place of the packages that compute them."""
    for name in names:
        module, parts = NEWER_FLASH[name][0], NEWER_FLASH[name][0].split(".")
        for path in [".".join(parts[:count]) for count in range(1, len(parts) + 1)]:
            fake = ModuleType(path)
            fake.__spec__ = ModuleSpec(path, None, is_package=path != module)
            fake.__path__ = []
            monkeypatch.setitem(sys.modules, path, fake)


@pytest.mark.parametrize(
    ("installed", "major", "name"),
    [
        ([], 9, ""),
        (["FA3"], 8, ""),
        (["FA3"], 9, "FA3"),
        (["FA3"], 10, ""),
        (["FA4"], 9, "FA4"),
        (["FA4"], 10, "FA4"),
        (["FA3", "FA4"], 9, "FA3"),
        (["FA3", "FA4"], 10, "FA4"),
        (["FA3", "FA4"], 12, ""),
    ],
)
def test_a_newer_flash_attention_is_taken_where_it_is_installed_and_knows_the_gpu(
    monkeypatch: pytest.MonkeyPatch, installed: list[str], major: int, name: str
) -> None:
    install(monkeypatch, *installed)
    assert newer_flash(major) == name


def test_torch_has_these_names_and_looks_for_these_modules() -> None:
    from torch.nn.attention import _fa3, _fa4

    assert set(NEWER_FLASH) <= set(attention.list_flash_attention_impls())
    for name, register in {"FA3": _fa3.register_flash_attention_fa3, "FA4": _fa4.register_flash_attention_fa4}.items():
        assert inspect.signature(register).parameters["module_path"].default == NEWER_FLASH[name][0]


def test_on_a_cpu_nothing_is_activated() -> None:
    use_newer_flash(CPU)
    assert attention.current_flash_attention_impl() is None


def test_one_that_gives_the_same_attention_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    monkeypatch.setattr(attention, "activate_flash_attention_impl", calls.append)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: calls.append("restored"))
    assert activate_if_right("FA3", CPU, torch.float32)
    assert calls == ["FA3"]


def test_one_that_gives_another_attention_or_fails_is_taken_back_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = list[str]()
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: calls.append("restored"))
    with pytest.raises(ModuleNotFoundError, match="flash_attn"):
        attention.activate_flash_attention_impl("FA3")
    assert not activate_if_right("FA3", CPU, torch.float32)
    assert "FA3 is installed but not used: No module named 'flash_attn_interface'" in caplog.text

    plain = packing.scaled_dot_product_attention

    def activate(_: str) -> None:
        monkeypatch.setattr(packing, "scaled_dot_product_attention", lambda *given, **more: 1.1 * plain(*given, **more))

    monkeypatch.setattr(attention, "activate_flash_attention_impl", activate)
    assert not activate_if_right("FA4", CPU, torch.float32)
    assert "FA4 is installed but not used: a gradient or result is off by 0." in caplog.text
    assert calls == ["restored", "restored"]
