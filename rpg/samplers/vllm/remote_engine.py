"""An engine's process on a machine without ranks, where the launcher has started it."""

from rpg.processes import ranks
from rpg.processes.store import launch_store
from rpg.samplers.vllm.dedicated import EngineProcessError
from rpg.samplers.vllm.meeting import MeetingError, meet_engine
from specs.machine.launch import launch_key


class RemoteEngine:
    """It is connected by TCP, and ends with the connection. How it ended is the launcher's to see."""

    def __init__(self, number: int) -> None:
        """Waits until it is there.

        Args:
            number: of the engine among those of the run, from 0.
        Raises:
            EngineProcessError: it has not come.
        """
        store = launch_store(keeps=ranks.rank() == 0)
        try:
            self._meeting = meet_engine(number, launch_key(), store)
        except MeetingError as error:
            raise EngineProcessError(str(error)) from None
        self._number = number
        self.connection = self._meeting.connection
        self.sender_address = self._meeting.own_address

    def has_ended(self) -> bool:
        """Nobody on this machine knows."""
        return False

    def end_error(self, method: str) -> EngineProcessError:
        """The error of an ended engine, with the machine, whose log has the cause."""
        return EngineProcessError(
            f"engine {self._number} on {self._meeting.host} has ended, or cannot be reached any more, in {method}. The"
            " log of its machine has what it said"
        )

    def close(self) -> None:
        """Ends it."""
        self.connection.close()
