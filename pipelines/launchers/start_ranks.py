"""DeepSpeed's launcher with its own arguments, as a program: `python -m pipelines.launchers.start_ranks`."""

import os

from specs.machine.launch import KEY, ON_LOOPBACK, new_key
from specs.machine.parent import before_torch


def main() -> None:
    """Starts the ranks and waits for them. They meet only on this machine, with a key that they inherit.

    If torch sees no GPU, they compute on the CPU, and a variable tells DeepSpeed so: otherwise it would search for an
    accelerator and log a warning that it found none.
    """
    before_torch()
    import torch

    os.environ.update(ON_LOOPBACK, **{KEY: new_key()})
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported
    from deepspeed.launcher import launch

    launch.main()


if __name__ == "__main__":
    main()
