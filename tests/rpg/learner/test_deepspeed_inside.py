"""What DeepSpeed does not promise and the learner reads is as it expects it."""

import inspect
import subprocess
import sys

import pytest
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils.mixed_precision_linkage import link_hp_params

from rpg.learner.deepspeed_inside import fragment


def test_zero_3_writes_a_groups_float32_shards_into_the_module_by_the_groups_number() -> None:
    source = inspect.getsource(DeepSpeedZeroOptimizer_Stage3)
    assert "def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id):" in source
    assert "self.fp16_groups" in source
    assert "self.persistent_parameters" in source


def test_a_partition_holds_the_pieces_of_parameters_that_deepspeed_links_to_it() -> None:
    """Parameters of 4 and 6 elements lie end to end; the second of two ranks has elements 5 to 9 of these ten."""
    parameters = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(6))]
    link_hp_params(
        lp_param_list=parameters,
        flat_hp_partition=torch.zeros(5),
        gradient_dict={0: []},
        offload_gradient_dict={},
        use_offload=False,
        param_group_index=0,
        partition_start=5,
        partition_size=5,
        dp_group=None,
    )
    assert [fragment(parameter) for parameter in parameters] == [None, (1, 0, 5)]


@pytest.mark.more
def test_deepspeed_comes_without_mlflow_which_can_be_imported_afterwards() -> None:
    code = (
        "import sys, importlib.util; from rpg.learner.deepspeed_imported import deepspeed\n"
        "print(deepspeed.__name__, [name for name in sys.modules if name.partition('.')[0] == 'mlflow'],"
        " importlib.util.find_spec('mlflow') is not None)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "deepspeed [] True"
