"""Replay of a run's recorded steps under its own objective and under others. The steps are read once for all
objectives."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.home.home import Home
from pipelines.replay.gradients import Moment, StepGradients, objective_gradients
from pipelines.replay.objectives import Alternative, own_objective
from pipelines.replay.rows import ChosenSteps, RunRows
from pipelines.replay.weights import KeptWeights, NoWeightsError, SummedSteps, keeps_updates
from rpg.replay.comparison import GradientComparison, LargestDifferences
from rpg.replay.step import RecordedStep, ReplayedStep, replay_step, response_advantages
from rpg.replay.tally import Tally
from specs.reading.recorded import recorded_spec
from specs.schema.schedule import largest
from storage import Store


@dataclass(slots=True)
class Reproduction:
    """Differences between the recorded training and a replay under the run's own objective."""

    ratio: float = 0.0
    """Largest relative difference of a token's ratio."""
    clipped: int = 0
    """Number of tokens that were clipped in only one of the two."""
    advantage: float = 0.0
    """Largest difference of a response's advantage."""
    loss: float | None = None
    """Largest difference of a step's loss; None if the logprobs of an update were not recorded."""
    logprob: float = 0.0
    """Largest difference of a token's logprob, computed with kept weights, nats; 0 if none was computed."""

    @property
    def holds(self) -> bool:
        """Whether the differences are only rounding, by which another device's sums over tokens differ too."""
        losses = (self.loss or 0.0) < 1e-5 + self.logprob and self.logprob < 0.1
        return self.ratio < 1e-4 and not self.clipped and self.advantage < 1e-4 and losses

    def add(self, step: RecordedStep, replayed: ReplayedStep, difference: float | None) -> None:
        """Adds a step, whose recorded values the run's own objective should reproduce.

        Args:
            difference: difference of its loss; None if no loss is on record.
        """
        trained = replayed.trained
        if trained.any():
            ratio = step.ledger["ratios"][trained]
            self.ratio = max(self.ratio, float(((replayed.ratio[trained] - ratio).abs() / ratio).max()))
            self.clipped += int((replayed.clipped[trained] != (step.ledger["clipped"][trained] > 0)).sum())
        apart = response_advantages(step, replayed).numpy() - step.advantages
        self.advantage = max(self.advantage, float(abs(apart).max()))
        if self.loss is not None and difference is not None:
            self.loss = max(self.loss, difference)


@dataclass(slots=True)
class RunReplay:
    """Figures of a run's steps under its own objective and under another, by step and over all steps."""

    run_id: str
    recorded: Alternative
    replayed: Alternative
    reproduction: Reproduction
    """Precision with which the run's own objective reproduces the record."""
    sums: SummedSteps
    """Steps for which divergences over tokens were computed."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    overall: dict[str, Any] = field(default_factory=dict)
    furthest: list[dict[str, Any]] = field(default_factory=list)
    gradients: list[StepGradients] | None = None
    """Parameter gradients; None if they were not requested."""

    @property
    def left_out(self) -> list[str]:
        """Returns a sentence for each part of training that was not recorded."""
        training, sentences = self.recorded.experiment.training, []
        if largest(training.entropy_coef):
            sentences.append(
                f"the gradient of the entropy bonus (training.entropy_coef {training.entropy_coef}): it needs each"
                " token's whole distribution, which is not recorded. The losses have the bonus; gradient weights,"
                " cosine and length do not"
            )
        if training.router_aux_loss_coef:
            sentences.append(
                f"the loss that balances experts (training.router_aux_loss_coef {training.router_aux_loss_coef:g}):"
                " which expert a token was sent to is not on record"
            )
        if training.epochs > 1:
            sentences.append(
                f"all but the last of training.epochs {training.epochs}: the record has each token's last update,"
                " which losses and weights here refer to"
            )
        if self.sums.computed:
            sentences.append(
                "the gradient of a divergence that is summed over tokens: it is not along the sampled token's logprob."
                " The losses have the sum; gradient weights, cosine and length do not; --gradients does"
            )
        if self.sums.missing:
            whose = "" if self.replayed.sum else "the run's own objective at "
            steps = ", ".join(map(str, self.sums.missing))
            sentences.append(f"{whose}step {steps}: {self.sums.reason}")
        in_reward = self.replayed.experiment.objective.penalizes_reward
        if in_reward and any(step["untrained_tokens"] for step in self.steps):
            sentences.append(
                "the divergence that the replayed objective takes off the reward, for tokens that were not trained on:"
                " their logprobs are not on record"
            )
        if self.gradients and not keeps_updates(self.recorded.experiment):
            sentences.append(
                "the grad_norm on record, beside the gradients: it is the mean over several updates, or was taken at"
                " other weights"
            )
        return sentences

    def as_json(self) -> dict[str, Any]:
        """Returns plain data."""
        differences = self.reproduction
        gradients = {} if self.gradients is None else {"gradients": self.gradients}
        return {
            "run_id": self.run_id,
            "label": self.replayed.label,
            "swept": self.replayed.swept,
            "recorded": self.recorded.as_json(),
            "replayed": self.replayed.as_json(),
            "reproduced": {
                "holds": differences.holds,
                "ratio": differences.ratio,
                "clipped": differences.clipped,
                "advantage": differences.advantage,
                "loss": differences.loss,
            },
            **({"sums": self.sums.as_json()} if self.sums.sums else {}),
            "left_out": self.left_out,
            "overall": self.overall,
            "steps": self.steps,
            "furthest": self.furthest,
            **gradients,
        }


def replay_run(
    home: Home,
    run_id: str,
    others: Sequence[Alternative],
    *,
    chosen: ChosenSteps | None = None,
    gradients: Moment | None = None,
) -> list[RunReplay]:
    """Replays a run's recorded rollouts under its own objective and under others. Returns one replay for each other
    objective.

    Objectives that sum a divergence over tokens need the weights of a step. If one of the others does, only the steps
    whose weights are kept are replayed; if only the run's own does, its figures are of these steps alone.

    Args:
        gradients: the weights at which parameter gradients are computed, see `objective_gradients`; None computes no
            gradients.
    Raises:
        NothingToReplayError: no such steps are on record, or some lack tokens.
        NoWeightsError: gradients are requested of steps whose weights are not kept, or nothing could be computed.
    """
    chosen = chosen or ChosenSteps()
    own = own_objective(recorded_spec(home.run(run_id)))
    training = own.experiment.training
    reproduction = Reproduction(loss=0.0 if training.epochs == 1 else None)
    own_tally, sums = Tally(), [_Sums() for _ in others]
    with Store.open(home.root) as store:
        rows = RunRows(store, home, run_id)
        kept = KeptWeights(rows, own.experiment)
        summed = SummedSteps.of(kept, [own, *others])
        replays = [RunReplay(run_id, own, other, reproduction, summed) for other in others]
        if gradients:
            entries = objective_gradients(kept, chosen, own, others, moment=gradients)
            for replay, of_alternative in zip(replays, entries, strict=True):
                replay.gradients = of_alternative
        losses, loops = rows.metric("loss"), rows.loops(own.experiment)
        for step in rows.chosen_steps(chosen):
            number = step.step
            step = summed.add_to(step, own.experiment.at_step(number, loops.get(number)))
            if not step.states and any(other.sum for other in others):
                continue
            recorded, own_metrics = None, {}
            if step.states or own.sum is None:
                recorded = replay_step(step, own.experiment.at_step(number, loops.get(number)))
                of_step = _tally(recorded, training.minibatches)
                own_tally.merge(of_step)
                own_metrics = of_step.metrics()
                loss = losses.get(number)
                # Without trained tokens the loss is 0.
                reproduction.add(step, recorded, None if loss is None else abs(loss - own_metrics.get("loss", 0.0)))
            for replay, of_replay in zip(replays, sums, strict=True):
                other = replay_step(step, replay.replayed.experiment.at_step(number, loops.get(number)))
                of_step = _tally(other, training.minibatches)
                replay.steps.append(_step_entry(number, recorded, other, own_metrics, of_step.metrics()))
                of_replay.tally.merge(of_step)
                if recorded:
                    of_replay.gradients.add(recorded, other)
                    of_replay.furthest.add(step, recorded, other)
    reproduction.logprob = max((each["logprob_change"] for each in summed.computed), default=0.0)
    if not replays[0].steps and not gradients:
        raise NoWeightsError(summed.reason)
    for replay, of_replay in zip(replays, sums, strict=True):
        replay.overall = {
            "recorded": own_tally.metrics(),
            "replayed": of_replay.tally.metrics(),
            **of_replay.gradients.metrics(),
        }
        replay.furthest = of_replay.furthest.tokens()
    return replays


@dataclass(slots=True)
class _Sums:
    """Sums of one objective over steps."""

    tally: Tally = field(default_factory=Tally)
    gradients: GradientComparison = field(default_factory=GradientComparison)
    furthest: LargestDifferences = field(default_factory=LargestDifferences)


def _tally(replayed: ReplayedStep, updates: int) -> Tally:
    tally = Tally()
    tally.add(replayed, updates)
    return tally


def _step_entry(
    step: int,
    recorded: ReplayedStep | None,
    other: ReplayedStep,
    own_metrics: dict[str, float],
    other_metrics: dict[str, float],
) -> dict[str, Any]:
    """Returns the metrics of one step under both objectives; without `recorded` those of the other alone."""
    gradients = GradientComparison()
    if recorded:
        gradients.add(recorded, other)
    trained = int(other.trained.sum())
    return {
        "step": step,
        "tokens": trained,
        "untrained_tokens": len(other.trained) - trained,
        "recorded": own_metrics,
        "replayed": other_metrics,
        **gradients.metrics(),
    }
