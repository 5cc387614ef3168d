"""What starts the training ranks, and on which machines. Nothing here changes a result."""

from typing import Annotated, Literal

from pydantic import Field

from specs.schema.base import Spec, names_path, unless_said

HOST_NAME = r"^[A-Za-z0-9_.:@\[\]][A-Za-z0-9_.:@\[\]-]*$"
"""What ssh takes for a host; no leading hyphen, which it would take for an option."""


class LocalLauncher(Spec):
    """Ranks on this machine."""

    type: Literal["local"] = "local"
    """local: DeepSpeed's launcher on this machine."""


class Host(Spec):
    """A machine that ranks may run on."""

    host: str = Field(pattern=HOST_NAME)
    """As ssh knows it: a name, an address, user@name or a name of the ssh configuration."""
    slots: int = Field(1, ge=1)
    """Ranks that it takes; with GPUs, one each."""


class _Cluster(Spec):
    """What launchers over several machines share. The run's directory must be one that all of them see."""

    python: str = ""
    """The interpreter on the other machines; empty: the path of this one."""
    interface: str = ""
    """Network interface over which the ranks meet (gloo, NCCL); empty: the one under which a machine was reached."""
    environment: dict[str, str] = Field({})
    """Variables for every rank, e.g. {NCCL_IB_DISABLE: "1"}."""
    restarts: int = Field(3, ge=0)
    """Losses of a machine or a rank, in a row and without a checkpoint between them, after which the run begins again
    from its last checkpoint without having failed."""


class SshLauncher(_Cluster):
    """One ssh connection a host; what runs there ends with it."""

    type: Literal["ssh"]
    """ssh: this command reaches the hosts by ssh and stays connected."""
    hosts: tuple[Host, ...] = ()
    """Filled in order, as far as training.ranks needs them; what is left over stands in for a lost one."""
    hostfile: str = names_path("file", "")
    """In the place of hosts: a file as DeepSpeed's, a line `NAME slots=N` for each host."""
    ssh: tuple[str, ...] = Field(("ssh",), min_length=1)
    """The program and its options, e.g. [ssh, -F, cluster.conf, -p, "2222"]."""
    connect_seconds: float = Field(30.0, gt=0)
    """A host that has not answered after so long counts as unreachable."""
    lost_after_seconds: float = Field(30.0, ge=2)
    """A host that is silent for so long is lost; a host that hears nothing for so long ends its ranks by itself."""
    recover_seconds: float = Field(600.0, ge=0)
    """How long a run that lost hosts waits until enough of them answer again for training.ranks."""
    min_ranks: int = Field(0, ge=0)
    """Then it goes on with as many ranks as the hosts that do answer take, if they are so many; 0: training.ranks."""


class SlurmLauncher(_Cluster):
    """A batch job of Slurm's; requeued when it is preempted, at its time limit, or loses a node."""

    type: Literal["slurm"]
    """slurm: sbatch hands the run to Slurm, srun starts the ranks, this command waits."""
    nodes: int = Field(1, ge=1)
    """Machines; training.ranks must be a multiple."""
    partition: str = ""
    """Empty: Slurm's default."""
    time_limit_minutes: int = Field(0, ge=0)
    """Of one stretch of the job; at its end the run saves its state and is queued again. 0: the partition's."""
    stop_before_seconds: int = Field(120, ge=1)
    """Before the time limit: when the trainer is told to save its state. Longer than a step and a checkpoint take."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, e.g. [--account=lab, "--gres=gpu:8", --constraint=h100]."""


Launcher = Annotated[
    LocalLauncher | SshLauncher | SlurmLauncher, Field(discriminator="type"), unless_said("type", "local")
]
