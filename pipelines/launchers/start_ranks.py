"""DeepSpeed's launcher with its own arguments, as a program: `python -m pipelines.launchers.start_ranks`."""

import os

from specs.machine.launch import KEY, ON_LOOPBACK, new_key
from specs.machine.parent import before_torch


def main() -> None:
    """Starts the ranks and waits for them. They meet on this machine alone, by a key that they inherit.

    Where torch sees no GPU they compute on the CPU, which DeepSpeed is told: else it would look for an accelerator and
    warn in the log that there is none.
    """
    before_torch()
    import torch

    os.environ.update(ON_LOOPBACK, **{KEY: new_key()})
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"  # read where DeepSpeed is imported
    from deepspeed.launcher import launch

    launch.main()


if __name__ == "__main__":
    main()
