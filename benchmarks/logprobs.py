"""Time, memory and error of chunked token logprobs against the plain way and TRL's tiled head.

    python benchmarks/logprobs.py [--hidden 256 2560] [--tokens 4096] [--repeats 2] [--ways plain chunked]

Each measurement is a process of its own. Memory: peak beyond the inputs and their gradients, which every way must hold
(on a CPU of the resident set, on a GPU of torch's allocator). Time: forward and backward, the least of the repeats; on
a CPU it is CPU seconds, so that other load does not count. The plain way computes no entropy, the others do.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 151_936
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits at once, logprobs alone."""
    return torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None])[:, 0]


def plain_with_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits at once, and the entropy from them."""
    logprobs = torch.log_softmax((hidden @ weight.T).float(), -1)
    with torch.no_grad():
        (logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0]


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """This project's."""
    from rpg.learner.logprobs import token_logprobs

    return token_logprobs(hidden, weight, targets)[0]


def trl(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """TRL 1.16's tiled head with its own tile of 4,096 tokens by 4,096 tokens of the vocabulary, and the entropy."""
    from trl.kernels import ChunkedLogProbFunction

    logprobs: Tensor = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 4096, None, 1.0, ("entropy",))[
        0
    ]
    return logprobs


def full(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """This project's, with the divergence over the vocabulary from a reference."""
    from rpg.learner.logprobs import Compared, token_divergences

    compared = Compared("reverse", hidden.detach().roll(1, 0), weight.detach(), None)
    logprobs, _, state, _ = token_divergences(hidden, weight, targets, compared)
    return logprobs + state.value


def top_k(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """This project's, with the logprobs of 64 further tokens."""
    from rpg.learner.logprobs import token_logprobs

    return token_logprobs(hidden, weight, targets[:, None] - torch.arange(65, device=targets.device))[0].sum(-1)


WAYS: dict[str, Way] = {
    "plain": plain,
    "plain_with_entropy": plain_with_entropy,
    "chunked": chunked,
    "full": full,
    "top_k": top_k,
    "trl": trl,
}


def make_inputs(hidden_size: int, tokens: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of unit size, a head whose logits have unit variance, random targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((tokens, hidden_size), generator=generator)
    weight = torch.randn((VOCABULARY, hidden_size), generator=generator) / hidden_size**0.5
    targets = torch.randint(64, VOCABULARY, (tokens,), generator=generator).to(device)
    return hidden.to(device, dtype).requires_grad_(), weight.to(device, dtype).requires_grad_(), targets


def peak_bytes(device: str) -> int:
    """The largest memory since `forget_peak`."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


def forget_peak(device: str) -> None:
    """Makes the memory in use now the largest."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def now(device: str) -> float:
    """Seconds."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return float(time.process_time())


def measure(way: Way, hidden_size: int, tokens: int, repeats: int, device: str, dtype: torch.dtype) -> dict[str, float]:
    """One way in this process."""
    hidden, weight, targets = make_inputs(hidden_size, tokens, device, dtype)
    upstream = torch.linspace(-1, 1, tokens, device=device)
    forget_peak(device)
    before, seconds = peak_bytes(device), []
    for _ in range(repeats):
        hidden.grad = weight.grad = None
        start = now(device)
        torch.autograd.backward(way(hidden, weight, targets), upstream)
        seconds.append(now(device) - start)
    gradients = (hidden.numel() + weight.numel()) * hidden.element_size()
    return {"seconds": min(seconds), "gib": (peak_bytes(device) - before - gradients) / 2**30}


def gradient_error(hidden_size: int, tokens: int, device: str) -> float:
    """Largest relative error in norm of the gradients against the plain ones, float32, on a quarter of the tokens."""
    found = []
    for way in (plain, chunked):
        hidden, weight, targets = make_inputs(hidden_size, tokens // 4, device, torch.float32)
        torch.autograd.backward(way(hidden, weight, targets), torch.linspace(-1, 1, tokens // 4, device=device))
        found.append((hidden.grad, weight.grad))
    errors: list[float] = []
    for expected, mine in zip(*found, strict=True):
        assert mine is not None
        errors.append(((mine - expected).norm() / expected.norm()).item())
    return max(errors)


def apart(arguments: list[str]) -> dict[str, float]:
    """Runs this file again for one measurement."""
    said = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(said)
    return result


def main() -> None:
    """Prints a table on stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 2560])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=["plain", "plain_with_entropy", "chunked"], choices=list(WAYS))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    dtype = getattr(torch, asked.dtype)
    if asked.one == "error":
        print(json.dumps({"error": gradient_error(asked.hidden[0], asked.tokens, asked.device)}))
        return
    if asked.one:
        print(json.dumps(measure(WAYS[asked.one], asked.hidden[0], asked.tokens, asked.repeats, asked.device, dtype)))
        return
    common = [f"--{name}={getattr(asked, name)}" for name in ("tokens", "repeats", "device", "dtype")]
    threads = torch.get_num_threads()
    print(f"vocabulary {VOCABULARY}, {asked.tokens} tokens, {asked.dtype}, {asked.device}, {threads} threads")
    for hidden_size in asked.hidden:
        size = [f"--hidden={hidden_size}", *common]
        found = {way: apart([f"--one={way}", *size]) for way in asked.ways}
        first = found[asked.ways[0]]
        for way, figures in found.items():
            times, share = figures["seconds"] / first["seconds"], figures["gib"] / first["gib"]
            print(
                f"hidden {hidden_size:5}  {way:18}  {figures['seconds']:7.2f} s ({times:.2f}x)  "
                f"{figures['gib']:6.2f} GiB (1/{1 / share:.1f})"
            )
        print(f"hidden {hidden_size:5}  gradient error     {apart(['--one=error', *size])['error']:.1e}")


if __name__ == "__main__":
    main()
