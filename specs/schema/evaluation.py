"""How checkpoints are measured."""

from typing import Literal, Self

from pydantic import Field, model_validator

from specs.schema.base import Spec, addition, execution
from specs.schema.rollout import StopText


class LiteratureTable(Spec):
    """Accuracies from the literature. Reports and comparisons show them beside measured ones, marked as published."""

    source: str = Field(min_length=1)
    """The paper and its table."""
    measure: str = Field("mean@1", pattern=r"^mean@[1-9][0-9]*$")
    """Measure of the table. mean@k is the mean accuracy over k responses to a problem."""
    datasets: tuple[str, ...] = Field(min_length=1)
    """Evaluation sets, by their names in this spec."""
    rows: dict[str, list[list[float]]] = Field(min_length=1)
    """Label of a row of matrix.zip, or name of an evaluation's model -> [last, best] for each dataset: the accuracy of
    the last and of the best checkpoint, as shares. For an untrained model, give the same value twice."""
    remarks: str = ""
    """Remarks that a reader of the figures needs."""

    @model_validator(mode="after")
    def _pairs_of_shares(self) -> Self:
        for label, row in self.rows.items():
            pairs_of_shares = all(len(pair) == 2 and all(0 <= share <= 1 for share in pair) for pair in row)
            if len(row) != len(self.datasets) or not pairs_of_shares:
                raise ValueError(f"{label} needs [last, best], shares between 0 and 1, for each of the datasets")
        return self


class Evaluation(Spec):
    """Evaluation of checkpoints: each one answers each problem of each evaluation set several times."""

    checkpoints: Literal["initial_and_final", "final", "all"] = "initial_and_final"
    """Checkpoints to evaluate. initial is the base model; all adds every exported step
    (training.export_every_steps)."""
    every_steps: int = addition(0, ge=0)
    """Steps between evaluations that the trainer runs during training. 0 disables them. The base model and the last
    step are always evaluated after training."""
    concurrent_ranks: int = execution(0, ge=0)
    """Ranks that evaluate each checkpoint as soon as it is exported, while training continues. They have their own
    GPUs: free ones of this machine, or their own job (slurm) or placement group (ray). Evaluations that are missing
    when training ends run afterwards, as with 0. The results are the same."""
    datasets: tuple[str, ...] = ()
    """Names of evaluation sets. Empty means all."""
    samples_per_problem: int = Field(8, ge=1)
    """Responses per problem: the k of mean@k, the largest k of pass@k and maj@k."""
    temperature: float = Field(1.0, ge=0)
    """0 is greedy decoding."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: sample from the smallest set of tokens that holds this probability."""
    top_k: int = addition(0, ge=0)
    """Sample from this many of the likeliest tokens; the nucleus is taken from these. 0 means all tokens."""
    stop: tuple[StopText, ...] = addition(())
    """Texts that end a response, as with rollout.stop."""
    max_response_length: int = Field(0, ge=0)
    """Largest number of tokens of a response. 0 means rollout.max_response_length."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """Confidence level of the intervals."""
    seed: int = Field(0, ge=0)
    """Seed of the sampling, independent of the run's seed."""
    drift: bool = addition(True)
    """Whether each evaluation measures the divergence between the policy and the policy before training, as
    `drift/reverse` and `drift/forward`. It needs responses sampled at temperature 1 without top_p and top_k. If the
    evaluation samples that way, it uses the evaluation's responses; otherwise it samples as many again. The model
    before training is loaded for it once more."""
    literature: tuple[LiteratureTable, ...] = execution(())
    """Accuracies from the literature, shown beside the measured ones."""

    @property
    def samples_policy(self) -> bool:
        """Whether responses are drawn from the policy itself: temperature 1, no token cut off."""
        return self.temperature == 1 and self.top_p == 1 and not self.top_k
