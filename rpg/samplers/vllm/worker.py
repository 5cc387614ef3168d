"""Methods that we add to vLLM's workers. vLLM mixes this class into its own worker class in every worker process."""

import signal
from typing import Any

from torch import Tensor, nn

from specs.machine.parent import die_with_parent


class WorkerExtension:
    """Mixin whose methods are called by name through the engine's `collective_rpc`."""

    def follow_engine(self) -> None:
        """Makes this process, which must be the worker's own, end with its engine and ignore signals to stop.

        vLLM's workers end at SIGTERM, which Slurm sends to all processes of a job. The engine, which runs until the
        trainer has ended its step, would lose them.
        """
        die_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def pack_weights_again(self) -> None:
        """Renews the packed copies of weights that vLLM multiplies with on a CPU; a GPU has no such copies.

        vLLM's own reload does not renew the copy of a tied head, and leaves the experts of a mixture unpacked. It
        reports no error, and logprobs are wrong.
        """
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        model: nn.Module = self.get_model()  # type: ignore[attr-defined]  # the worker's
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and isinstance(weight, Tensor) and weight.numel():
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
            if isinstance(module, RoutedExperts):
                kernel: Any = module.quant_method.moe_kernel
                kernel.fused_experts.process_weights_after_loading(module)
