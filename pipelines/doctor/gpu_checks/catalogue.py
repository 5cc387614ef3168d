"""The checks, in execution order: those that later ones depend on come first."""

from pipelines.doctor.gpu_checks.check import Check

_ENGINE = (
    "see the check's log; `make vllm` or `pip install 'rpg-experiments[vllm]'` installs the release that is tested"
)

CHECKS = (
    Check(
        "machine",
        "machine.describe",
        "the driver, torch and the device fit together, and a matrix product is right",
        "install the torch build for this driver's CUDA version (pytorch.org), or a newer driver",
        limit_seconds=60,
    ),
    Check(
        "all_reduce",
        "network.all_reduce_between_pairs",
        "pairs of ranks add up their tensors, each at a rate like that of the other pairs",
        "NCCL_DEBUG=INFO in launcher.environment shows the path that NCCL takes. NCCL_IB_HCA and NCCL_SOCKET_IFNAME"
        " choose it. Check the cable or the switch of a slow pair",
        scope="all",
        ranks=2,
    ),
    Check(
        "gradients",
        "numerics.gradients_at_every_stage",
        "gradients of DeepSpeed at ZeRO 0, 1, 2 and 3 in bfloat16 are those of PyTorch in float32",
        "compare the versions with those of constraints.txt: deepspeed, torch and transformers must fit together",
        scope="all",
    ),
    Check(
        "step_zero_2",
        "speed.step_at_zero_2",
        "a training step has a rate and a memory as estimated",
        "nvidia-smi shows clocks, temperature and other processes; resources.memory_gib sets the free memory for `rpg"
        " plan`",
        scope="all",
    ),
    Check(
        "step_zero_3",
        "speed.step_at_zero_3",
        "a training step with sharded weights has a rate and a memory as estimated",
        "nvidia-smi shows clocks, temperature and other processes; if only this check is slow, see all_reduce",
        scope="all",
    ),
    Check(
        "train_and_resume",
        "training.trained_and_resumed",
        "`rpg.train` trains packed rows at ZeRO 3, moves its state to the host while it samples, and resumes",
        "the check's log has the trainer's output; compare deepspeed, torch and liger_kernel with constraints.txt",
        scope="host",
        limit_seconds=360,
    ),
    Check(
        "colocated",
        "engines.colocated",
        "a vLLM engine in the trainer's process samples with the weights that it is given",
        f"another process may hold the GPU's memory; {_ENGINE}",
        scope="host",
        package="vllm",
    ),
    Check(
        "asleep",
        "engines.asleep",
        "it gives its memory back while the trainer computes, and wakes with the right weights",
        f"write rollout: {{sleep: false}}; {_ENGINE}",
        scope="host",
        gpus=1,
        package="vllm",
    ),
    Check(
        "dedicated",
        "engines.dedicated",
        "a vLLM engine in a process of its own reads the weights on the same device (on a GPU by ipc)",
        f"write rollout: {{placement: colocated}}; {_ENGINE}",
        scope="host",
        package="vllm",
    ),
    Check(
        "dedicated_nccl",
        "engines.dedicated_nccl",
        "a vLLM engine on another GPU receives the weights (nccl)",
        f"if all_reduce passed, the engine is at fault: {_ENGINE}",
        scope="host",
        gpus=2,
        package="vllm",
    ),
)
