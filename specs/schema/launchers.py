"""Launchers: programs that start the training ranks, and on which machines. Nothing here changes a result.

A launcher is a section here, which says what is wrong with it, and the module of its type's name in
`pipelines/launchers`.
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
"""Name of an environment variable, in a shell too."""
POOL_NAME = r"^([A-Za-z0-9][A-Za-z0-9_.-]*)?$"
"""What a work pool may be called: it is part of addresses and of a deployment's name. Empty: the pool `rpg`."""


class _Launcher(Spec):
    """Fields of every launcher's section."""

    package: ClassVar[str] = ""
    """The package that the machine needs which starts the ranks; empty: none beside this one's."""
    pool: str = execution("", pattern=POOL_NAME)
    """The Prefect work pool whose workers take the run when it is submitted; empty: `rpg`."""
    collective_timeout_seconds: float = execution(900.0, gt=0)
    """Seconds that a rank waits for another one in a collective operation of the learner. Then the attempt ends, with
    the ranks that did not arrive. Waits for rollouts and judges have no such limit: see `standstill_seconds`."""

    def issues(self, training: Training) -> Iterator[Issue]:
        """Errors that make it impossible to train so, beyond what single fields show. Paths begin at the experiment."""
        del training
        yield from ()

    def ranks_of_machines(self, ranks: int) -> list[int]:
        """How many of the ranks each machine has."""
        return [ranks]

    @property
    def engine_machines(self) -> int:
        """Machines over which engines are spread beside ranks. 1 if the engines have separate machines."""
        return 1

    @property
    def engines_key(self) -> str:
        """The key that puts dedicated engines on machines without ranks; empty where they are with the ranks."""
        return ""

    def engine_issues(self, engines: int) -> Iterator[Issue]:
        """Obstacles to so many engines on the machines that have no ranks."""
        del engines
        yield from ()

    def checking(self, ranks: int) -> tuple[Self, int]:
        """The launcher that starts ranks where this one starts engines alone, too; and how many it starts.

        Args:
            ranks: which this one starts.
        """
        return self, ranks

    def beside(self, training: Training, ranks: int) -> Self:
        """The launcher of `ranks` more that work while training does, which has its own, engines included."""
        del training, ranks
        return self


class LocalLauncher(_Launcher):
    """Ranks on this machine."""

    type: Literal["local"] = "local"
    """local: DeepSpeed's launcher on this machine."""


class _Nodes(_Launcher):
    """Fields of launchers over several machines, which they are given. All machines must see the run's directory."""

    nodes: int = Field(1, ge=1, le=MAX_RANKS)
    """Machines; training.ranks must be a multiple."""
    engine_nodes: int = Field(0, ge=0, le=MAX_RANKS)
    """Further machines of the job, for dedicated vLLM engines alone, over which these are spread evenly; 0: the engines
    are on the machines of the ranks."""
    python: str = ""
    """The interpreter on the other machines; empty: the path of this one."""
    interface: str = ""
    """Network interface over which the ranks meet (gloo); empty: the one under which a machine was reached. NCCL finds
    the fastest by itself, unless NCCL_SOCKET_IFNAME or NCCL_IB_HCA in `environment` says otherwise."""
    environment: dict[str, str] = Field({})
    """Variables for every rank, e.g. {NCCL_IB_DISABLE: "1"}. A secret as a reference that each machine resolves when
    ranks start there: env:NAME, a variable of that machine or of this command; file:/PATH, a file's content."""
    restarts: int = Field(3, ge=0)
    """How often in a row, with no new checkpoint between, the run may lose a machine or a rank and go on from its last
    checkpoint. One loss more is a failure."""

    def ranks_of_machines(self, ranks: int) -> list[int]:
        """Ranks of each node, the same on all."""
        return [ranks // self.nodes] * self.nodes

    @property
    def engine_machines(self) -> int:
        """The nodes with ranks, unless others are for engines."""
        return 1 if self.engine_nodes else self.nodes

    def beside(self, training: Training, ranks: int) -> Self:
        """In a job of their own, on a node at most as many as training has there."""
        return self.model_copy(update={"nodes": -(-ranks * self.nodes // training.ranks), "engine_nodes": 0})

    @property
    def engines_key(self) -> str:
        """Where there are nodes for them."""
        return "engine_nodes" if self.engine_nodes else ""

    def checking(self, ranks: int) -> tuple[Self, int]:
        """A launcher that checks every node, and its ranks: as many on a node with engines as on one with ranks."""
        nodes = self.nodes + self.engine_nodes
        return self.model_copy(update={"nodes": nodes, "engine_nodes": 0}), ranks // self.nodes * nodes

    def engine_issues(self, engines: int) -> Iterator[Issue]:
        """More nodes than engines."""
        if engines < self.engine_nodes:
            yield Issue(
                "more nodes than engines",
                ("launcher", "engine_nodes"),
                given=f"{self.engine_nodes} for {engines} engines",
                allowed=f"at most {engines}",
            )

    def engines_of_nodes(self, engines: int) -> list[int]:
        """How many of the engines each of their nodes has, the first ones one more where they do not divide."""
        return [(engines + self.engine_nodes - 1 - node) // self.engine_nodes for node in range(self.engine_nodes)]

    def issues(self, training: Training) -> Iterator[Issue]:
        """Ranks that do not divide, variables that cannot be set, and secrets that stand in the spec itself."""
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
                yield Issue("is no name of a variable", path, allowed="letters, digits and _, no digit first")
            if "\0" in value:
                yield Issue("no variable can hold the character NUL", path)
            if looks_secret(name, value):
                yield Issue(
                    "a secret stands in the spec, which is stored and shared",
                    path,
                    given=HIDDEN,
                    allowed=f"env:NAME or file:/PATH, e.g. env:{name}",
                    hint="the machines of the run read it when ranks start; nothing else is written down",
                    snippet=f"{name}: {HIDDEN}",
                )


class SlurmLauncher(_Nodes):
    """A batch job of Slurm's; requeued when it is preempted, at its time limit, or loses a node."""

    type: Literal["slurm"]
    """slurm: sbatch hands the run to Slurm, srun starts the ranks, this command waits."""
    partition: str = ""
    """Empty: Slurm's default."""
    time_limit_minutes: int = Field(0, ge=0)
    """Time limit of one stretch of the job; at its end the run saves its state and is queued again. 0: the
    partition's."""
    stop_before_seconds: int = Field(120, ge=1)
    """Before the time limit: when the trainer is told to save its state. Longer than a step and a checkpoint take."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, e.g. [--account=lab, "--gres=gpu:8", --constraint=h100]."""
    srun_options: tuple[str, ...] = ()
    """Further options of srun, which starts ranks and engines, e.g. pyxis' [--container-image=/images/rpg.sqsh,
    "--container-mounts=/shared:/shared"]."""
    srun_python: str = ""
    """The interpreter that srun starts on each node, or a script that starts one in a container; empty: the one that
    runs the batch script, `python`."""

    def issues(self, training: Training) -> Iterator[Issue]:
        """Yields a time limit that is too short, and options that are malformed or set by the launcher."""
        yield from super().issues(training)
        limit = self.time_limit_minutes * 60
        if limit and self.stop_before_seconds >= limit:
            given = f"{self.stop_before_seconds} s of {limit} s"
            yield Issue("no time is left to train in", ("launcher", "stop_before_seconds"), given=given)
        of_job = "launcher.nodes, .partition and .time_limit_minutes, and training.ranks, say it"
        of_step = "srun starts one task on each node of the job, with its environment"
        for key, set_by_us, hint in (("options", _SET_BY_US, of_job), ("srun_options", _SET_BY_US_OF_SRUN, of_step)):
            for index, option in enumerate(getattr(self, key)):
                path = ("launcher", key, index)
                name = option.lstrip("-").partition("=")[0]
                if len(option) < 2 or not option.startswith("-") or " " in option.strip():
                    yield Issue("is no option", path, given=option, allowed="--name=value, one an item")
                elif name in set_by_us or (not option.startswith("--") and _SHORT_OPTIONS.get(option[1]) in set_by_us):
                    yield Issue("the launcher sets it", path, given=option, hint=hint)


_SET_BY_US = (
    *("nodes", "ntasks", "ntasks-per-node", "job-name", "output", "error", "time", "signal", "partition"),
    *("requeue", "no-requeue", "open-mode", "array", "wait", "parsable", "chdir"),
)
"""Options of sbatch that the launcher sets from the spec's own fields."""
_SET_BY_US_OF_SRUN = ("nodes", "ntasks", "ntasks-per-node", "export", "kill-on-bad-exit", "multi-prog")
"""Options of srun that the launcher sets, or that would start another program."""
_SHORT_OPTIONS = {
    **{"N": "nodes", "n": "ntasks", "J": "job-name", "o": "output"},
    **{"e": "error", "t": "time", "p": "partition", "K": "kill-on-bad-exit"},
}


class RayLauncher(_Nodes):
    """One placement group of a Ray cluster a launch, a bundle a node."""

    package: ClassVar[str] = "ray"
    type: Literal["ray"]
    """ray: Ray says on which nodes ranks and engines are, and with which GPUs; this command is a driver of the
    cluster's and stays connected."""
    address: str = "auto"
    """The cluster, of which this machine is a node: auto, the one that runs here, or that RAY_ADDRESS names; or
    HOST:PORT of its head."""
    cpus_per_rank: float = Field(1.0, gt=0)
    """CPUs that Ray counts for a rank or an engine."""
    resources: dict[str, float] = Field({})
    """Further resources of Ray's for a rank or an engine, e.g. {"accelerator_type:H100": 0.001}."""
    autoscaling: bool = False
    """Whether the cluster adds nodes that are asked for: a run then waits for what no node has yet. Without it such a
    run is refused."""

    connect_seconds: float = Field(30.0, gt=0)
    """A node that has not answered after so long counts as unreachable."""
    lost_after_seconds: float = Field(30.0, ge=2)
    """A node that is silent for so long is lost; a node that hears nothing for so long ends its ranks by itself."""
    recover_seconds: float = Field(600.0, ge=0)
    """How long a run that lost nodes waits until there is room for training.ranks again."""
    min_ranks: int = Field(0, ge=0)
    """Then it resumes with as many ranks as there is room for, if they are so many; 0: training.ranks."""

    def beside(self, training: Training, ranks: int) -> Self:
        """In a placement group of their own."""
        return super().beside(training, ranks).model_copy(update={"min_ranks": 0})

    def issues(self, training: Training) -> Iterator[Issue]:
        """An address that is none of a node's cluster, resources that have a key of their own, or none of which is
        asked for, and more ranks at least than there are at most."""
        yield from super().issues(training)
        if self.min_ranks > training.ranks:
            given = f"{self.min_ranks} of {training.ranks}"
            yield Issue("is more than training.ranks", ("launcher", "min_ranks"), given)
        if self.address != "auto" and not re.fullmatch(r"[\w.-]+:\d+|\[[0-9a-fA-F:.]+\]:\d+", self.address):
            yield Issue(
                "is no address of a cluster that this machine is a node of",
                ("launcher", "address"),
                given=self.address,
                allowed="auto, or HOST:PORT of its head",
                hint="start `rpg run` on a node of the cluster, e.g. `kubectl exec -it HEAD-POD -- rpg run FILE`; "
                "Ray's client (ray://) can neither give orders to a rank that works nor tell of drained nodes",
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
    """The issue where the package that the launcher needs is not on this machine."""
    if not launcher.package or find_spec(launcher.package) is not None:
        return None
    hint = f"pip install 'rpg-experiments[{launcher.package}]'"
    return Issue(f"{launcher.package} is not installed", ("launcher", "type"), given=launcher.type, hint=hint)
