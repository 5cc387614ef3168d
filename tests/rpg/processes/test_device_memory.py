"""Peak memory: what torch counts, less what an engine has given back while it sleeps."""

import pytest

from rpg.processes.device_memory import PeakMemory


class Device:
    """A counter as torch's: bytes allocated now, and the most since it was made to forget."""

    def __init__(self) -> None:
        self.allocated = self.most = 0

    def allocate(self, num_bytes: int) -> None:
        self.allocated += num_bytes
        self.most = max(self.most, self.allocated)

    def forget(self) -> None:
        self.most = self.allocated


def test_tensors_whose_memory_is_given_back_do_not_count_while_it_is() -> None:
    device = Device()
    peak = PeakMemory(lambda: device.most, device.forget)
    device.allocate(50)  # an engine
    device.allocate(10)  # weights of the learner
    peak.unmapped(45)
    device.allocate(40)
    assert device.most == 100
    assert peak.highest() == 60, "awake it was more than 15 + 40"
    device.allocate(10)
    assert peak.highest() == 65
    device.allocate(-50)
    peak.unmapped(0)
    assert peak.highest() == 65
    device.allocate(8)
    assert peak.highest() == 68, "the engine is awake again, its 45 count"


@pytest.mark.vllm
def test_the_bytes_that_vllms_allocator_has_unmapped_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.device_allocator import AllocationData, cumem

    from rpg.samplers.vllm.engine import asleep_bytes

    assert asleep_bytes() == 0, "no engine was made that can sleep"
    allocator = cumem.CuMemAllocator()
    for pointer, (num_bytes, tag) in enumerate([(3, "weights"), (40, "kv_cache"), (500, "kv_cache")]):
        allocator.pointer_to_data[pointer] = AllocationData((0, num_bytes, pointer, 0), tag)
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
    monkeypatch.setattr(cumem, "unmap_and_release", lambda _: None)  # the driver's part: a CPU has none
    monkeypatch.setattr(cumem, "create_and_map", lambda _: None)
    monkeypatch.setattr(cumem.torch.accelerator, "empty_cache", lambda: None)
    assert asleep_bytes() == 0
    allocator.sleep(offload_tags=())
    assert asleep_bytes() == 543
    allocator.wake_up(tags=["weights"])
    assert asleep_bytes() == 540
    allocator.wake_up()
    assert asleep_bytes() == 0
