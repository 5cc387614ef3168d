"""A Prefect process worker that starts only our flows.

`python -m pipelines.prefect.flows.workers.process_worker`

Prefect's own worker starts any command in any environment and directory that a flow run, its deployment or its pool
names, and loads the flow from the deployment's location. Ours takes all of them from this code. A flow run that
requests anything else fails, and its state says why.
"""

import tempfile
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import WorkPool
from prefect.runner import Runner
from prefect.states import Failed
from prefect.workers.base import BaseWorkerResult
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker

from pipelines.home.home import Home
from pipelines.prefect.server.deployments import DEPLOYMENTS, Deployment
from specs.machine.own_cache import local_directory
from specs.machine.scratch import Scratch

if TYPE_CHECKING:
    from anyio.abc import TaskStatus
    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.responses import DeploymentResponse

WORKER_TYPE = "rpg"
HOOKS = ("_run_on_crashed_hooks", "_run_on_cancellation_hooks")
"""Methods of Prefect's runner that call a flow's hooks."""


class RefusedError(Exception):
    """Error for a flow run that would start something other than one of our flows."""


def wanted_flow(flow: str, flow_run: "FlowRun", deployment: "DeploymentResponse | None") -> Deployment:
    """Returns which of our flows a flow run starts.

    Args:
        flow: the flow's name on the server.
        deployment: the flow run's deployment.
    Raises:
        RefusedError: it would start another flow, or with other settings than ours.
    """
    ours = next((each for each in DEPLOYMENTS if each.flow == flow), None)
    if ours is None or deployment is None:
        raise RefusedError(f"the flow {flow!r} of this deployment is not from this package")
    if flow_run.job_variables:
        names = ", ".join(sorted(flow_run.job_variables))
        raise RefusedError(f"the flow run has job variables of its own: {names}")
    differences = {
        "entrypoint": deployment.entrypoint != ours.entrypoint,
        "job variables": deployment.job_variables != ours.job,
        "pull steps": bool(deployment.pull_steps),
        "storage": deployment.storage_document_id is not None,
    }
    if changed := [name for name, differs in differences.items() if differs]:
        raise RefusedError(f"the deployment {deployment.name!r} is not from this package: {', '.join(changed)}")
    return ours


class OwnJob(ProcessJobConfiguration):
    """The job of a flow run. The server chooses only which of our flows it runs."""

    @classmethod
    async def resolve_for_flow_run(
        cls,
        flow_run: "FlowRun",
        *,
        client: PrefectClient,
        work_pool: WorkPool,
        worker_name: str,
        worker_id: UUID | None = None,
        deployment: "DeploymentResponse | None" = None,
    ) -> "OwnJob":
        """Returns the job of one of our flows. Raises RefusedError for another flow."""
        if deployment is None and flow_run.deployment_id:
            deployment = await client.read_deployment(flow_run.deployment_id)
        flow = await client.read_flow(flow_run.flow_id)
        ours = wanted_flow(flow.name, flow_run, deployment)
        # Prefect's engine loads this deployment, and does not ask the server whether it has changed.
        job = cls(command=ours.job["command"], env={"PREFECT__FLOW_ENTRYPOINT": ours.entrypoint})
        job.prepare_for_flow_run(flow_run, deployment, flow, work_pool, worker_name, worker_id)
        return job


class OwnWorker(ProcessWorker):
    """Worker that takes flow runs of our deployments from a pool of Prefect's type `process`."""

    job_configuration = OwnJob

    @staticmethod
    def __dispatch_key__() -> str:
        """Returns the name of this kind of worker on Prefect's command line."""
        return WORKER_TYPE

    async def __aenter__(self) -> "OwnWorker":
        """Enters like Prefect's worker, without hooks: to find a flow's hooks, Prefect would load the flow from its
        deployment's location. Also moves Prefect's files from `/tmp/runner_storage`, which belongs to its first user,
        to this user's own directory."""
        await super(ProcessWorker, self).__aenter__()
        runner = Runner(pause_on_shutdown=False, limit=None)
        runner._tmp_dir = local_directory("prefect") / self.name
        self._runner = await self._exit_stack.enter_async_context(runner)
        for name in HOOKS:
            setattr(self._runner, name, _no_hooks)
        return self

    async def _submit_run_and_capture_errors(
        self, flow_run: "FlowRun", task_status: "TaskStatus[int | Exception] | None" = None
    ) -> BaseWorkerResult | Exception:
        """Submits like Prefect's worker, but marks a refused flow run as failed. Prefect would mark it as crashed, and
        retry it."""
        try:
            deployment = await self.client.read_deployment(flow_run.deployment_id) if flow_run.deployment_id else None
            wanted_flow((await self.client.read_flow(flow_run.flow_id)).name, flow_run, deployment)
        except RefusedError as error:
            self._logger.warning("flow run %s (%s) is refused: %s", flow_run.name, flow_run.id, error)
            self._release_limit_slot(flow_run.id)
            await self.client.set_flow_run_state(flow_run.id, Failed(message=f"refused: {error}"), force=True)
            if task_status:
                task_status.started(error)
            return error
        return await super()._submit_run_and_capture_errors(flow_run, task_status)


async def _no_hooks(*_arguments: Any) -> None:
    pass


def main() -> None:
    """Runs Prefect's command line, extended by our kind of worker.

    Prefect's temporary files are in the home, and the next command removes them: a worker ends by being killed.
    """
    from prefect.cli import app

    with Scratch(Home.from_environment().root, "worker") as directory:
        tempfile.tempdir = str(directory)
        app()


if __name__ == "__main__":
    main()
