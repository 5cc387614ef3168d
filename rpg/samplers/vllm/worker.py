"""A method that we add to vLLM's workers: vLLM mixes this class into its own, in whatever process it runs."""

from torch import Tensor, nn


class WorkerExtension:
    """Called by name through the engine's `collective_rpc`."""

    def pack_weights_again(self) -> None:
        """Renews the packed copies of weights with which vLLM multiplies on a CPU; on a GPU there are none.

        vLLM's own reload does not renew the copy of a tied head. It reports nothing, and logprobs are wrong by as much
        as the weights have moved.
        """
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        model: nn.Module = self.get_model()  # type: ignore[attr-defined]  # the worker's
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and isinstance(weight, Tensor) and weight.numel():
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
