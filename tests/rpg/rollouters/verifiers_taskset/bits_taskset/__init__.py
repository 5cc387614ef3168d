"""Strings of bits, whose first bit is asked: a taskset of `verifiers`, its tasks generated."""

import verifiers.v1 as vf


class BitsData(vf.TaskData):
    answer: str


class BitsTask(vf.Task[BitsData]):
    @vf.reward(weight=1.0)
    async def first(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip()[:1] == self.data.answer)


class BitsConfig(vf.TasksetConfig):
    bits: int = 2
    """Length of a string."""


class BitsTaskset(vf.Taskset[BitsTask, BitsConfig]):
    def load(self) -> list[BitsTask]:
        strings = [f"{number:0{self.config.bits}b}" for number in range(2**self.config.bits)]
        return [BitsTask(BitsData(prompt=f"{bits}=", answer=bits[0]), self.config.task) for bits in strings]


__all__ = ["BitsTaskset"]
