"""One check in its own process.

`python -m pipelines.doctor.gpu_checks.child CHECK DEVICE DIRECTORY OUT [together]`: DEVICE is cpu or cuda. OUT gets the
Result. together: all ranks run the check, and meet in the store of the first one.
"""

import os
import socket
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from pipelines.doctor.gpu_checks.catalogue import CHECKS
from pipelines.doctor.gpu_checks.check import Bench, Check, CheckFailedError, Figures, Result
from specs.machine.files import write_json
from specs.machine.parent import before_torch, die_with_parent


def main(name: str, device_type: str, directory: Path, out: Path, *, together: bool) -> None:
    """Runs the check and writes its result."""
    die_with_parent()
    before_torch()
    check = next(check for check in CHECKS if check.name == name)
    rank = int(os.environ.get("RANK", "0"))  # before it becomes the only rank of its own group
    start, figures = time.monotonic(), Figures()
    try:
        figures = _made(check, device_type, directory, together=together)
        failure = ""
    except CheckFailedError as error:
        failure = str(error)
    except Exception as error:
        traceback.print_exc()
        failure = f"{type(error).__name__}: {error}".split("\n", 1)[0]
    result = Result(
        name,
        "failed" if failure else "ok",
        failure,
        figures,
        time.monotonic() - start,
        rank,
        socket.gethostname(),
    )
    write_json(out, asdict(result), allow_nan=True)


def _made(check: Check, device_type: str, directory: Path, *, together: bool) -> Figures:
    """Returns the figures of the check."""
    if device_type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # which DeepSpeed reads on import
    import torch
    from torch.distributed.distributed_c10d import PrefixStore

    from rpg.processes import ranks
    from rpg.processes.device import choose_device
    from rpg.processes.store import launch_store
    from specs.schema.execution import Resources

    device = choose_device(Resources.model_validate({"device": device_type}))
    if device_type == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks.on_this_machine()))
    if together:
        ranks.join_in(PrefixStore(check.name, launch_store(keeps=False)), device_type)
    else:
        ranks.join(device_type)
    try:
        return check.load()(Bench(device, directory))
    finally:
        ranks.leave()


if __name__ == "__main__":
    name, device_type, directory, out, *how = sys.argv[1:]
    main(name, device_type, Path(directory), Path(out), together=how == ["together"])
