"""Launchers: programs that start the training ranks, on one machine or several. Nothing here changes a result.

A launcher is a section here, which reports its own errors, and a module in `pipelines/launchers` with the name of its
type.
"""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from specs.bounds import MAX_RANKS
from specs.errors import Issue
from specs.schema.base import Spec, execution, unless_said
from specs.schema.training import Training
from specs.secrets import HIDDEN, looks_secret

VARIABLE_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
"""Pattern of an environment variable's name, also valid in a shell."""
POOL_NAME = r"^([A-Za-z0-9][A-Za-z0-9_.-]*)?$"
"""Pattern of a work pool's name, which occurs in URLs and in a deployment's name. Empty means the pool `rpg`."""


class _Launcher(Spec):
    """Fields of every launcher's section."""

    package: ClassVar[str] = ""
    """Name of the package that the launching machine needs. Empty if it needs only this distribution's packages."""
    pool: str = execution("", pattern=POOL_NAME)
    """Prefect work pool for submitted runs. Empty means `rpg`."""
    collective_timeout_seconds: float = execution(900.0, gt=0)
    """Seconds that a rank waits for another rank in a collective operation of the learner. After that the attempt fails
    and names the ranks that did not arrive. Waits for rollouts and judges are limited by `standstill_seconds`
    instead."""

    def issues(self, training: Training) -> Iterator[Issue]:
        """Yields errors that involve several fields and make training impossible. Paths begin at the experiment."""
        del training
        yield from ()

    def ranks_of_machines(self, ranks: int) -> list[int]:
        """Returns the number of ranks on each machine."""
        return [ranks]

    @property
    def engine_machines(self) -> int:
        """Number of machines with ranks over which engines are spread. 1 if the engines have separate machines."""
        return 1

    @property
    def engines_key(self) -> str:
        """Key of the spec that puts dedicated engines on machines without ranks; empty if engines are on the ranks'
        machines."""
        return ""

    @property
    def asks_for_gpus(self) -> bool:
        """Whether the section itself asks the cluster for GPUs, whatever `resources.device` says."""
        return False

    def engine_issues(self, engines: int) -> Iterator[Issue]:
        """Yields issues with this many engines on the machines that have no ranks."""
        del engines
        yield from ()

    def checking(self, ranks: int) -> tuple[Self, int]:
        """Returns a launcher that also starts ranks on the machines with engines only, and its number of ranks.

        Args:
            ranks: number of ranks that this launcher starts.
        """
        return self, ranks

    def beside(self, training: Training, ranks: int) -> Self:
        """Returns the launcher for `ranks` further ranks that run beside training's ranks and engines."""
        del training, ranks
        return self


class LocalLauncher(_Launcher):
    """Ranks on this machine."""

    type: Literal["local"] = "local"
    """local: DeepSpeed's launcher on this machine."""


class _Nodes(_Launcher):
    """Fields of launchers over several given machines. All machines must see the run's directory."""

    nodes: int = Field(1, ge=1, le=MAX_RANKS)
    """Number of machines; training.ranks must be a multiple."""
    engine_nodes: int = Field(0, ge=0, le=MAX_RANKS)
    """Number of further machines, which run only dedicated vLLM engines. The engines are spread evenly over them. 0
    puts the engines on the ranks' machines."""
    python: str = ""
    """Path of the interpreter on the other machines. Empty means the path of this one."""
    interface: str = ""
    """Network interface over which the ranks connect (gloo). Empty means the interface over which a machine was
    reached. NCCL chooses the fastest by itself, unless NCCL_SOCKET_IFNAME or NCCL_IB_HCA in `environment` overrides
    it."""
    environment: dict[str, str] = Field({})
    """Environment variables of every rank, e.g. {NCCL_IB_DISABLE: "1"}. Write a secret as a reference, which each
    machine resolves when ranks start there: env:NAME is a variable of that machine or of this command; file:/PATH is
    the content of a file."""
    restarts: int = Field(3, ge=0)
    """How often in a row, without a new checkpoint in between, the run may lose a machine or a rank and resume from its
    last checkpoint. One more loss fails the run."""

    def ranks_of_machines(self, ranks: int) -> list[int]:
        """Returns the ranks of each node, the same on all."""
        return [ranks // self.nodes] * self.nodes

    @property
    def engine_machines(self) -> int:
        """Number of nodes with ranks, or 1 if other nodes are for engines."""
        return 1 if self.engine_nodes else self.nodes

    def beside(self, training: Training, ranks: int) -> Self:
        """Returns the launcher for a separate job with at most as many ranks per node as training has."""
        return self.model_copy(update={"nodes": -(-ranks * self.nodes // training.ranks), "engine_nodes": 0})

    @property
    def engines_key(self) -> str:
        """`engine_nodes` if there are nodes for engines only."""
        return "engine_nodes" if self.engine_nodes else ""

    def checking(self, ranks: int) -> tuple[Self, int]:
        """Returns a launcher that checks every node, and its number of ranks. A node with engines gets as many as a
        node with ranks."""
        nodes = self.nodes + self.engine_nodes
        return self.model_copy(update={"nodes": nodes, "engine_nodes": 0}), ranks // self.nodes * nodes

    def engine_issues(self, engines: int) -> Iterator[Issue]:
        """Yields an issue if there are more nodes than engines."""
        if engines < self.engine_nodes:
            yield Issue(
                "more nodes than engines",
                ("launcher", "engine_nodes"),
                given=f"{self.engine_nodes} for {engines} engines",
                allowed=f"at most {engines}",
            )

    def engines_of_nodes(self, engines: int) -> list[int]:
        """Returns the number of engines on each node with engines. If they do not divide evenly, the first nodes have
        one more."""
        return [(engines + self.engine_nodes - 1 - node) // self.engine_nodes for node in range(self.engine_nodes)]

    def issues(self, training: Training) -> Iterator[Issue]:
        """Yields issues with ranks that do not divide evenly, variables that cannot be set, and secrets written in the
        spec itself."""
        yield from super().issues(training)
        if training.ranks % self.nodes:
            yield Issue(
                "the ranks do not divide",
                ("launcher", "nodes"),
                given=f"{training.ranks} ranks on {self.nodes} nodes",
                hint="training.ranks must be a multiple of launcher.nodes",
            )
        for name, value in self.environment.items():
            path = ("launcher", "environment", name)
            if not re.fullmatch(VARIABLE_NAME, name):
                yield Issue("is not the name of a variable", path, allowed="letters, digits and _, no digit first")
            if "\0" in value:
                yield Issue("no variable can hold the character NUL", path)
            if looks_secret(name, value):
                yield Issue(
                    "the spec contains a secret, but specs are stored and shared",
                    path,
                    given=HIDDEN,
                    allowed=f"env:NAME or file:/PATH, e.g. env:{name}",
                    hint="the machines of the run read it when ranks start; nothing else is written down",
                    snippet=f"{name}: {HIDDEN}",
                )


class SlurmLauncher(_Nodes):
    """A Slurm batch job. It is requeued after preemption, at its time limit, or after the loss of a node."""

    type: Literal["slurm"]
    """slurm: sbatch submits the run to Slurm, srun starts the ranks, and this command waits."""
    partition: str = ""
    """Partition of the job. Empty means Slurm's default."""
    time_limit_minutes: int = Field(0, ge=0)
    """Minutes that one attempt of the job may take. At the end the run saves its state and is queued again. 0 means the
    partition's limit."""
    stop_before_seconds: int = Field(120, ge=1)
    """Seconds before the time limit at which the trainer gets the signal to save its state. It must exceed the time of
    a step and a checkpoint."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, e.g. [--account=lab, "--gres=gpu:8", --constraint=h100]."""
    srun_options: tuple[str, ...] = ()
    """Further options of srun, which starts ranks and engines, e.g. pyxis' [--container-image=/images/rpg.sqsh,
    "--container-mounts=/shared:/shared"]."""
    srun_python: str = ""
    """Interpreter that srun starts on each node, or a script that starts one in a container. Empty means the
    interpreter that runs the batch script, `python`."""

    @property
    def asks_for_gpus(self) -> bool:
        """Whether an option of sbatch asks for GPUs."""
        return any(option.startswith(_GPU_OPTIONS) for option in self.options)

    def issues(self, training: Training) -> Iterator[Issue]:
        """Yields issues with a time limit that is too short, and options that are malformed or that the launcher
        sets."""
        yield from super().issues(training)
        limit = self.time_limit_minutes * 60
        if limit and self.stop_before_seconds >= limit:
            given = f"{self.stop_before_seconds} s of {limit} s"
            yield Issue("no time is left for training", ("launcher", "stop_before_seconds"), given=given)
        of_job = "write it as launcher.nodes, launcher.partition, launcher.time_limit_minutes or training.ranks"
        of_step = "srun starts one task on each node of the job, with its environment"
        for key, set_by_us, hint in (("options", _SET_BY_US, of_job), ("srun_options", _SET_BY_US_OF_SRUN, of_step)):
            for index, option in enumerate(getattr(self, key)):
                path = ("launcher", key, index)
                name = option.lstrip("-").partition("=")[0]
                if len(option) < 2 or not option.startswith("-") or " " in option.strip():
                    yield Issue("is not an option", path, given=option, allowed="--name=value, one in each item")
                elif name in set_by_us or (not option.startswith("--") and _SHORT_OPTIONS.get(option[1]) in set_by_us):
                    yield Issue("the launcher sets it", path, given=option, hint=hint)


_GPU_OPTIONS = ("--gres", "--gpu", "-G", "--tres-per")
_SET_BY_US = (
    *("nodes", "ntasks", "ntasks-per-node", "job-name", "output", "error", "time", "signal", "partition"),
    *("requeue", "no-requeue", "open-mode", "array", "wait", "parsable", "chdir"),
)
"""Options of sbatch that the launcher sets from the spec's own fields."""
_SET_BY_US_OF_SRUN = ("nodes", "ntasks", "ntasks-per-node", "export", "kill-on-bad-exit", "multi-prog")
"""Options of srun that the launcher sets itself, or that would start another program."""
_SHORT_OPTIONS = {
    **{"N": "nodes", "n": "ntasks", "J": "job-name", "o": "output"},
    **{"e": "error", "t": "time", "p": "partition", "K": "kill-on-bad-exit"},
}


class RayLauncher(_Nodes):
    """A Ray cluster: one placement group per launch, with one bundle per node."""

    package: ClassVar[str] = "ray"
    type: Literal["ray"]
    """ray: Ray assigns nodes and GPUs to ranks and engines; this command is a driver of the cluster and stays
    connected."""
    address: str = "auto"
    """Cluster that this machine is a node of. auto: the cluster that runs here, or that in RAY_ADDRESS. Otherwise
    HOST:PORT of the head."""
    cpus_per_rank: float = Field(1.0, gt=0)
    """CPUs that Ray reserves for a rank or an engine."""
    resources: dict[str, float] = Field({})
    """Further Ray resources of a rank or an engine, e.g. {"accelerator_type:H100": 0.001}."""
    autoscaling: bool = False
    """Whether the cluster adds nodes on demand. A run then waits for resources that no node has yet; otherwise such a
    run is refused."""

    connect_seconds: float = Field(30.0, gt=0)
    """Seconds without an answer after which a node counts as unreachable."""
    lost_after_seconds: float = Field(30.0, ge=2)
    """Seconds of silence after which a node counts as lost. A node that hears nothing for this long ends its ranks
    itself."""
    recover_seconds: float = Field(600.0, ge=0)
    """Seconds that a run waits, after it lost nodes, for room for training.ranks again."""
    min_ranks: int = Field(0, ge=0)
    """Smallest number of ranks with which the run resumes after that wait. It uses as many as fit. 0 means
    training.ranks."""

    def beside(self, training: Training, ranks: int) -> Self:
        """Returns the launcher for a separate placement group."""
        return super().beside(training, ranks).model_copy(update={"min_ranks": 0})

    def issues(self, training: Training) -> Iterator[Issue]:
        """Yields issues with an invalid address, resources that have their own key, amounts that are not positive, and
        a min_ranks above training.ranks."""
        yield from super().issues(training)
        if self.min_ranks > training.ranks:
            given = f"{self.min_ranks} of {training.ranks}"
            yield Issue("is more than training.ranks", ("launcher", "min_ranks"), given)
        if self.address != "auto" and not re.fullmatch(r"[\w.-]+:\d+|\[[0-9a-fA-F:.]+\]:\d+", self.address):
            yield Issue(
                "is not the address of a cluster with this machine as a node",
                ("launcher", "address"),
                given=self.address,
                allowed="auto, or HOST:PORT of its head",
                hint="start `rpg run` on a node of the cluster, e.g. `kubectl exec -it HEAD-POD -- rpg run FILE`;"
                " Ray's client (ray://) can neither signal running ranks nor report drained nodes",
            )
        for name, amount in self.resources.items():
            path = ("launcher", "resources", name)
            if name in ("CPU", "GPU"):
                key = "launcher.cpus_per_rank" if name == "CPU" else "resources.device"
                yield Issue("has a key of its own", path, given=name, hint=f"{key} says it")
            elif amount <= 0:
                yield Issue("must be above 0", path, given=f"{amount:g}")


Launcher = Annotated[
    LocalLauncher | SlurmLauncher | RayLauncher, Field(discriminator="type"), unless_said("type", "local")
]


def package_missing(launcher: Launcher) -> Issue | None:
    """Returns an issue if the package that the launcher needs is not installed; else None."""
    if not launcher.package or find_spec(launcher.package) is not None:
        return None
    hint = f"pip install 'rpg-experiments[{launcher.package}]'"
    return Issue(f"{launcher.package} is not installed", ("launcher", "type"), given=launcher.type, hint=hint)
