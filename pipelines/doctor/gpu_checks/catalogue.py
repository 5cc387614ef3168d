"""The checks, in the order in which they are made: what the later ones build on comes first."""

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
        " choose it. Look at the cable or the switch of a slow pair",
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
        "packing",
        "numerics.packed_against_single",
        "responses packed into a row have the logprobs and gradients of each alone",
        "write training: {packing: false}, which is slower; a newer torch may have the attention kernel that it needs",
    ),
    Check(
        "kernels",
        "numerics.fused_kernels",
        "gradients with Liger's kernels are off from float32 as little as those without",
        "leave training.kernels out; or compare liger_kernel and triton with constraints.txt",
        scope="host",
        gpus=1,
        package="liger_kernel",
    ),
    Check(
        "step_zero_2",
        "speed.step_at_zero_2",
        "a training step has a rate and a memory as estimated",
        "nvidia-smi shows clocks, temperature and other processes; resources.memory_gib tells `rpg plan` what is free",
        scope="all",
    ),
    Check(
        "step_zero_3",
        "speed.step_at_zero_3",
        "the same with sharded weights",
        "nvidia-smi shows clocks, temperature and other processes; where only this one is slow, look at all_reduce",
        scope="all",
    ),
    Check(
        "checkpoint",
        "training.state_saved_and_loaded",
        "weights and optimizer come back from a checkpoint in every bit",
        "run `rpg db check`; look at the disk of RPG_HOME",
        scope="all",
    ),
    Check(
        "state_away",
        "training.state_away_while_sampling",
        "what only updates need leaves the GPU while rollouts are sampled, and comes back as it was",
        "write training.offload: {while_sampling: false}; compare deepspeed and torch with constraints.txt",
        scope="all",
    ),
    Check(
        "train_and_resume",
        "training.trained_and_resumed",
        "`rpg.train` trains, pauses, and goes on from its checkpoint",
        "the check's log has the trainer's own words",
        scope="host",
        limit_seconds=240,
    ),
    Check(
        "sentinel",
        "engines.own_transformers_engine",
        "an engine with weights of its own takes new ones, and one that did not is noticed",
        "compare the version of transformers with that of constraints.txt",
        scope="host",
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
        "a vLLM engine on another GPU is sent the weights (nccl)",
        f"where all_reduce passed, the engine is at fault: {_ENGINE}",
        scope="host",
        gpus=2,
        package="vllm",
    ),
)
