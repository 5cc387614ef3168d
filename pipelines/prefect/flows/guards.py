"""Events for the Prefect server when a guard of a run acts, so that the server's automations can send a notice."""

from pipelines.running.run import RunExecution
from storage import Store

GUARD_EVENT = "rpg.guard"
"""Name of the Prefect event for a guard that acted. The payload has kind, step and message."""
_KINDS = ("guard_warned", "guard_stopped", "rolled_back")


class GuardEvents:
    """Sender of events for the guards of a run that trains. Sends nothing if the spec requests no notice of guards."""

    def __init__(self, execution: RunExecution) -> None:
        self._wanted = any("guard" in notice.on for notice in execution.plan.experiment.notify)
        # An earlier attempt has sent its own events.
        self._told = set(self._recorded(execution))

    def tell(self, execution: RunExecution) -> None:
        """Sends the events that the run has recorded since the last call."""
        for step, kind, message in self._recorded(execution):
            if (step, kind, message) not in self._told:
                self._told.add((step, kind, message))
                payload = {"kind": kind, "step": step, "message": message}
                tags = [f"experiment:{execution.plan.experiment.name}"]
                execution.outbox.event(GUARD_EVENT, f"rpg.run.{execution.run_id}", payload, tags)

    def _recorded(self, execution: RunExecution) -> list[tuple[int, str, str]]:
        if not self._wanted:
            return []
        kinds = ", ".join(f"'{kind}'" for kind in _KINDS)
        sql = f"select step, kind, message from events where run_id = ? and kind in ({kinds}) order by recorded_at"
        with Store.open(execution.home.root) as store:
            return [(step, kind, message) for step, kind, message in store.query(sql, (execution.run_id,)).rows]
