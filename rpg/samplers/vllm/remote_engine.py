"""Processes of engines on machines without ranks, started by the launcher."""

from rpg.processes import ranks
from rpg.processes.store import launch_store
from rpg.samplers.vllm.dedicated import EngineProcessError
from rpg.samplers.vllm.meeting import MeetingError, meet_engine
from specs.machine.launch import launch_key


class RemoteEngine:
    """An engine's process, connected by TCP. It ends with the connection. Only the launcher sees how it ended."""

    def __init__(self, number: int) -> None:
        """Waits until the engine is reachable.

        Args:
            number: number of the engine among those of the run, from 0.
        Raises:
            EngineProcessError: the engine did not become reachable.
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
        """Returns False, because this machine cannot know."""
        return False

    def end_error(self, method: str) -> EngineProcessError:
        """Returns the error for an ended engine, with the machine whose log has the cause."""
        return EngineProcessError(
            f"engine {self._number} on {self._meeting.host} has ended, or cannot be reached, in {method}. Its"
            " output is in its machine's log"
        )

    def close(self) -> None:
        """Ends the connection, and the engine with it."""
        self.connection.close()
