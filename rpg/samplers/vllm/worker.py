"""What a vLLM worker of ours can do besides: vLLM mixes this class into its own, in whatever process it runs."""

from torch import Tensor, nn


class WorkerExtension:
    """Called by name through the engine's `collective_rpc`."""

    def pack_weights_again(self) -> None:
        """Renews the packed copies by which vLLM multiplies on a CPU; elsewhere there are none.

        vLLM's reload leaves that of a tied head as it was. Nothing reports that; logprobs are off by as much as the
        weights have moved.
        """
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        model: nn.Module = self.get_model()  # type: ignore[attr-defined]  # the worker's
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and isinstance(weight, Tensor) and weight.numel():
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
