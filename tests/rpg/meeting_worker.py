"""A rank that meets others and gathers, as a process: `python -m tests.rpg.meeting_worker`.

Prints `met` once it is in the group. At each line of its input it meets the others anew, in another group, and prints
`again`; at the end of its input it prints what it has gathered.
"""

import sys

import torch

from rpg.processes import ranks


def main() -> None:
    torch.set_num_threads(1)
    ranks.join("cpu")
    print("met", flush=True)
    for line in sys.stdin:
        gathered = ranks.Channel().gather([ranks.rank(), line])
        assert gathered == [[rank, line] for rank in range(ranks.world_size())]
        print("again", flush=True)
    print(f"gathered {ranks.gather({'rank': ranks.rank()})} {float(ranks.total(torch.ones(1)))}", flush=True)
    ranks.leave()


if __name__ == "__main__":
    main()
