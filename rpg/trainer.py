"""The training loop. `Trainer.step` is one step of it and reads from top to bottom.

Regularized policy gradient (RPG), Zhang 2025, arXiv:2505.17508. Departures from the paper and its public code:

- The spec says which policy is the reference: the one that sampled the step, as in the paper, or one that moves on its
  own schedule. The losses therefore contain the factor pi_ref/pi_old, which is 1 in the paper.
- A loss is divided by one denominator over all microbatches and ranks (rpg/objectives/aggregate.py). The public code
  averages within microbatches, so its loss depends on how the batch is cut into them.
- Groups without signal (all rewards equal) stay in the batch and in every denominator. With `rollout.dynamic_sampling`
  other groups replace them, as in the paper, which also discards the surplus groups of larger batches.
- The learner computes `old_logprobs`, in the same microbatches that train, so the first update's ratios are exactly 1.
  The sampler's own logprobs affect the loss only if the spec asks for a correction. With `rollout.trust_logprobs` they
  are the `old_logprobs` of all minibatches except the first.
- With `rollout.max_staleness` an earlier policy samples a batch while training uses other batches. The batch's
  `old_logprobs` are the sampler's own, so the denominator of every ratio is the policy that sampled, in the first
  update too.
- With `training.skip_zero_advantage` responses without a gradient are not computed, but stay in every denominator.
- With schedules or closed loops in the spec the loss changes from step to step; all updates of a step use the same. A
  loop's value follows from the metrics of the steps before.
- Minibatches follow the order of the prompts; there is no further shuffling. The public code reorders responses to
  balance the ranks, so one group's responses may be in several minibatches.
- A gradient that is not finite ends the run. With `training.on_not_finite: skip` its update is skipped, as in the
  public code, which skips without limit.
- Dropout is off: the ratio compares two passes over the same tokens.
- With Schedule-Free AdamW the policy that is sampled, compared, saved or measured is the average of the iterates.
  Gradients are computed at another point, so the first update's ratios are not 1. The public code samples and
  evaluates at that point and computes `old_logprobs` at the average.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from rpg.advantages import response_means, with_signal
from rpg.base.shape import ModelShape, shape_of_config
from rpg.batches.batch import Bools, Microbatch, StepRollouts
from rpg.batches.ledger import ReferenceTable, TokenLedger
from rpg.batches.minibatches import Minibatch, cut, plan_step, trained_fraction
from rpg.batches.shares import hand_over
from rpg.batches.step_loss import pass_loss, step_advantages, trained_rewards
from rpg.components import TrainerComponents
from rpg.control.learning_rate import learning_rate
from rpg.evaluation.drift import drift_figures
from rpg.evaluation.records import scores_by_set
from rpg.guards import FiredGuard, GuardStoppedError, RollBackRequested
from rpg.learner.passes import Passes
from rpg.metrics import PassCounts, UpdateMetrics, peak_memory_gib, rollout_metrics, scheduled_values, staleness_metrics
from rpg.objectives import TokenBatch
from rpg.objectives.distribution import StateDivergence
from rpg.processes import ranks
from rpg.processes.stopping import StopAfterStep
from rpg.recording.progress import ProgressFile
from rpg.rewards import failures, prove
from rpg.rollouts.source import RolloutSource
from rpg.routing import balancing_loss
from rpg.run_recorder.recorder import RunRecorder
from rpg.run_recorder.state import TrainingState
from rpg.stopwatch import Stopwatch
from specs.machine.cards import peak_flops
from specs.schema.objective import RegularizedObjective
from specs.schema.schedule import constant, value_at

MOST_SKIPPED_IN_A_ROW = 20
"""Number of consecutive updates without a finite gradient after which the run ends, because its weights are probably
lost."""


class DivergedError(RuntimeError):
    """Error raised if a gradient or a loss is not finite."""


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """The responses of a step on which this rank trains, with the objective's inputs for each sampled token."""

    rollouts: StepRollouts
    minibatches: list[Minibatch]
    ledger: TokenLedger
    """Table of old and reference logprobs, and of the values that the updates record."""
    advantage: Tensor
    """Advantage of every sampled token that this rank holds. [M]"""
    trained_version: int
    """Version of the policy from which the first update starts."""


class Trainer:
    """The trainer of one run. Every rank runs this code, knows the scores of all rollouts of a step, and trains on its
    share."""

    def __init__(
        self,
        components: TrainerComponents,
        source: RolloutSource,
        state: TrainingState,
        recorder: RunRecorder,
        progress: ProgressFile,
    ) -> None:
        self.components = components
        self.source = source
        self.state = state
        self.recorder = recorder
        self.progress = progress
        self.spec = components.spec
        self.training = components.spec.training
        self.until: int = components.run.inputs().get("until", 0)
        """Step at which training pauses after its policy is evaluated and its state is saved. 0 means that it does not
        pause."""
        self.evaluates = "evaluation" in components.run.inputs()
        self.spec_now = components.spec
        """The spec with the values of the current step; see `Experiment.at_step`."""
        self.clock: Stopwatch | None = None
        """Stopwatch of the current step; None outside a step."""
        self.reward_is_proved = False
        """Whether the reward has scored a step since this process began. All ranks have all scores of a step."""
        self.largest_pass = 0
        """Number of tokens of the largest forward pass so far on any rank, including padding."""

    def train(self, stop: StopAfterStep) -> bool:
        """Trains to the last step. Returns False if training paused or was asked to stop; the state is then saved."""
        with stop.between_steps_only():
            if self.state.step == 0 and self.evaluates and (self.spec.evaluation.every_steps or self.until):
                self.components.sample_before_training()
            if self.evaluation_is_due():  # the previous attempt was stopped before it could evaluate
                self.evaluate()
                self.recorder.flush()
            while self.state.step < self.training.steps and not self.pausing:
                try:
                    stopping = self.step(stop)
                except RollBackRequested as request:
                    self.roll_back(request.fired)
                    continue
                if stopping and self.state.step < self.training.steps:
                    return False
        return self.state.step == self.training.steps

    @property
    def updates_per_step(self) -> int:
        """Returns the number of optimizer updates in a step, including skipped ones."""
        return self.training.minibatches * self.training.epochs

    @property
    def pausing(self) -> bool:
        """Whether training has reached the step at which it pauses."""
        return 0 < self.until <= self.state.step < self.training.steps

    @property
    def paused(self) -> bool:
        """Whether training has reached that step and has evaluated the policy there."""
        return self.pausing and not self.evaluation_is_due()

    def step(self, stop: StopAfterStep) -> bool:
        """Runs one step. Returns whether to stop now.

        Raises:
            GuardStoppedError, DivergedError, RollBackRequested: a guard fired.
        """
        self.clock = clock = Stopwatch(self.components.device, self.clock)
        self.state.step += 1
        self.spec_now = self.spec.at_step(self.state.step, self.components.loops.values)
        rollouts = self.sample(clock)
        self.components.set_temperature(constant(self.spec_now.rollout.temperature))
        with clock("logprobs"):
            scored = self.score(rollouts)
        with clock("update"), self.components.learner.updating():
            updates, rate = self.update(scored.minibatches, scored.advantage, scored.ledger)
        with clock("sync"):
            self.sync()
        metrics = self.metrics_of(scored, updates, rate)
        self.record(scored)
        return self.move_on(scored, metrics, clock, stop)

    def sample(self, clock: Stopwatch) -> StepRollouts:
        """Returns the responses that this rank sampled for the step, with rewards. The sampler then sleeps, if the spec
        allows it."""
        rollouts = self.source.next_batch(self.state.step, clock)
        if not self.reward_is_proved:
            prove(rollouts.scores, of_sampled=rollouts.figures.get("reward/error_fraction", 0.0))
            self.reward_is_proved = True
        self.components.sampler.sleep()
        return rollouts

    def score(self, rollouts: StepRollouts) -> ScoredStep:
        """Distributes the responses over the ranks and minibatches that train on them, and computes every token's old
        logprob, reference logprob and advantage."""
        learner = self.components.learner
        signal = self.signal(rollouts) if self.skips_zero_advantage else None
        plan = plan_step(
            rollouts, self.training, packed=self.components.packs, signal=signal, attention=learner.attention_share
        )
        trainers = plan.trainers(len(rollouts.lengths))
        rollouts = hand_over(rollouts, trainers, experts=self.spec.rollout.replay_routing)
        minibatches = cut(rollouts, plan, self.components.device)
        own = torch.tensor([self.largest_pass, *(part.largest_pass for part in minibatches)]).max()
        self.largest_pass = int(ranks.largest(own))  # a rank that helps another has no responses of its own
        ledger = TokenLedger(len(rollouts.rollout_logprobs), self.components.device)
        minibatches = self.recompute(minibatches, ledger)
        return ScoredStep(rollouts, minibatches, ledger, self.advantages(rollouts, ledger), self.state.policy_version)

    def metrics_of(self, scored: ScoredStep, updates: UpdateMetrics, rate: float) -> dict[str, float]:
        """Returns the step's metrics over all ranks, without times and memory. `rate`: the last update's learning
        rate."""
        rollouts, schedule = scored.rollouts, self.components.schedule
        return {
            **rollout_metrics(rollouts, trained_rewards(self.spec, rollouts).numpy(), self.components.problems),
            **updates.reduce(self.components.sentinel_metrics()),
            **staleness_metrics(rollouts, scored.trained_version),
            **(trained_fraction(scored.minibatches, rollouts) if self.skips_zero_advantage else {}),
            **({"skipped_updates": float(updates.num_skipped)} if self.training.on_not_finite == "skip" else {}),
            "learning_rate": rate,
            "reference/version": float(schedule.version),
            "reference/age_steps": float(schedule.age_steps),
            **scheduled_values(self.spec, self.state.step, self.components.loops.values),
        }

    def record(self, scored: ScoredStep) -> None:
        """Passes the step's responses and tokens to the recorder."""
        self.recorder.rollouts(
            self.state.step,
            scored.rollouts,
            response_means(scored.advantage, torch.from_numpy(scored.rollouts.held_num_sampled)),
            scored.ledger,
            trained_version=scored.trained_version,
            reference_version=self.components.schedule.version,
        )

    def move_on(self, scored: ScoredStep, metrics: dict[str, float], clock: Stopwatch, stop: StopAfterStep) -> bool:
        """Updates closed loops and the reference, evaluates and saves if due, and writes the step's rows.

        Returns:
            Whether to stop now.
        """
        computed = sum(minibatch.num_computed_with_context for minibatch in scored.minibatches)
        num_trained = computed * self.training.epochs
        if exception := self.check_guards(metrics) or self.source.failure():
            self.recorder.finish_step(self.state, metrics | clock.metrics(scored.rollouts, num_trained=num_trained))
            raise exception
        self.components.loops.follow(metrics)
        self.move_reference(metrics.get("kl/reverse"))
        stopping = stop.agreed(self.components.run.cancel)
        if (not stopping or self.state_follows_evaluations) and self.evaluation_is_due():
            with clock("evaluate"):
                self.evaluate()
        stopping = stopping or self.pausing
        if not stopping:
            self.source.prefetch(self.state.step)
        with clock("checkpoint"):
            self.recorder.save(self.state, stopping=stopping)
        metrics |= clock.metrics(scored.rollouts, num_trained=num_trained)
        metrics |= self.share_of_peak(scored.minibatches, clock.seconds("update"))
        metrics["memory/peak_gib"] = peak_memory_gib(self.components.device)
        self.recorder.finish_step(self.state, metrics)
        self.progress.step(self.state.step, metrics, not_scored=failures(scored.rollouts.scores))
        return stopping

    def share_of_peak(self, minibatches: list[Minibatch], seconds: float) -> dict[str, float]:
        """Returns the metric `mfu` of updates that took this many seconds; empty if the device's peak is unknown."""
        if not self.peak_flops:
            return {}
        counts = PassCounts.of_passes(batch for minibatch in minibatches for batch in minibatch.passes)
        frozen = self.training.lora is not None
        flops = self.shape.training_flops(counts.tokens, counts.responses, pairs=counts.pairs, frozen=frozen)
        of_rank = flops * self.training.epochs / self.training.sequence_parallel_size
        return {"mfu": of_rank / (seconds * self.peak_flops)}

    @property
    def skips_zero_advantage(self) -> bool:
        """Returns whether to leave out responses without advantage. They are kept if they count for the load of
        experts."""
        return self.spec.skips_zero_advantage and not self.components.learner.balancing

    @cached_property
    def shape(self) -> ModelShape:
        """Returns the figures of the model in training."""
        return shape_of_config(self.components.learner.model.config.to_dict())

    @cached_property
    def peak_flops(self) -> float:
        """Returns the peak FLOP/s of this rank's device in bfloat16; 0 if it is unknown."""
        device = self.components.device
        return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else 0.0

    @torch.no_grad()
    def recompute(self, minibatches: list[Minibatch], ledger: TokenLedger) -> list[Minibatch]:
        """Writes old and reference logprobs to the token table, before the policy changes.

        The first minibatch's old logprobs are left out if its first training pass computes them. If the spec trusts the
        sampler, or an earlier policy sampled, old logprobs are the sampler's own. If a divergence is summed over
        tokens, the ledger keeps the reference's distributions too. Over the vocabulary, they give the reference's
        logprobs in the training passes.

        Returns:
            The minibatches, with the counts of experts if their load is balanced.
        """
        balances = self.components.learner.balancing > 0
        if balances:
            minibatches = [replace(each, expert_counts=self.expert_counts(each, ledger)) for each in minibatches]
        from_sampler = self.spec.rollout.gives_old_logprobs
        for minibatch in minibatches[1:] if self.spec.first_pass_gives_old_logprobs else minibatches:
            for batch in minibatch.passes:
                if from_sampler:
                    ledger.write(batch, old_logprobs=batch.rollout_logprobs)
                elif not (balances or self.describes_sampler):
                    ledger.write(batch, old_logprobs=self.components.learner.logprobs(batch)[0])
        batches = [batch for minibatch in minibatches for batch in minibatch.passes]
        if self.components.reference:
            with self.components.reference.passes(self.components.learner.passes) as passes:
                for batch in batches:
                    self.write_reference(passes, batch, ledger)
        elif self.describes_sampler:
            for batch in batches:
                self.write_reference(self.components.learner.passes, batch, ledger)
        return minibatches

    @property
    def describes_sampler(self) -> bool:
        """Returns whether the distributions of the policy that sampled are those of the reference."""
        return self.components.reference is None and self.spec.objective.summed_over != "sampled"

    def write_reference(self, passes: Passes, batch: Microbatch, ledger: TokenLedger) -> None:
        """Writes the reference's logprobs, or its distributions if a divergence is summed over them."""
        objective = self.spec.objective
        if objective.summed_over == "sampled":
            self.write_ref_logprobs(batch, passes.logprobs(batch)[0], ledger)
            return
        if ledger.reference is None:
            changes = self.describes_sampler and self.training.lora is None
            copies = changes or self.training.zero_stage == 3  # there the head is whole only within a pass
            ledger.reference = ReferenceTable(len(ledger.columns["logprobs"]), copies_head=copies)
        logprobs, rows = passes.described(batch, objective.top_k, self.components.learner.passes.vocabulary)
        ledger.reference.write(batch, rows)
        self.write_ref_logprobs(batch, logprobs, ledger)

    def write_ref_logprobs(self, batch: Microbatch, logprobs: Tensor | None, ledger: TokenLedger) -> None:
        """Writes the reference's logprobs, if they are given. If the policy that sampled is the reference, they are
        written as the old logprobs instead, unless the sampler provides the old logprobs."""
        if logprobs is None:
            return
        if self.components.reference:
            ledger.write(batch, ref_logprobs=logprobs)
        elif not self.spec.rollout.gives_old_logprobs:
            ledger.write(batch, old_logprobs=logprobs)

    def expert_counts(self, minibatch: Minibatch, ledger: TokenLedger) -> Tensor:
        """Returns how many tokens, over all ranks, the policy routes to each expert. The same passes compute the old
        logprobs."""
        counts = []
        for batch in minibatch.passes:
            logprobs, _ = self.components.learner.logprobs(batch)
            ledger.write(batch, old_logprobs=logprobs)
            routing = self.components.learner.routing
            assert routing is not None, "the loss is balanced"
            counts.append(routing.counts * batch.counts)
        return ranks.total(torch.stack(counts).sum(0).cpu()).to(self.components.device)

    def advantages(self, rollouts: StepRollouts, ledger: TokenLedger) -> Tensor:
        """Returns the advantage of every sampled token that this rank holds. [M]"""
        old_logprobs = ledger.columns["old_logprobs"].cpu()
        ref_logprobs = ledger.columns["ref_logprobs"].cpu() if self.components.reference else old_logprobs
        return step_advantages(self.spec_now, rollouts, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)

    def signal(self, rollouts: StepRollouts) -> Bools:
        """Returns whether each response has a token with nonzero advantage. Advantages must not depend on logprobs.
        [B]"""
        of_held = with_signal(step_advantages(self.spec_now, rollouts), torch.from_numpy(rollouts.held_num_sampled))
        signal = torch.zeros(len(rollouts.lengths), dtype=torch.int64)
        signal[torch.from_numpy(rollouts.held)] = of_held.long()
        return (ranks.total(signal) > 0).numpy()

    def update(
        self, minibatches: list[Minibatch], advantage: Tensor, ledger: TokenLedger
    ) -> tuple[UpdateMetrics, float]:
        """Makes minibatches x epochs optimizer updates. Returns their metrics, and the learning rate of the last
        one."""
        metrics, rate = UpdateMetrics(self.components.device), 0.0
        advantage = advantage.to(self.components.device)
        for epoch in range(self.training.epochs):
            for number, minibatch in enumerate(minibatches):
                before = metrics.copy()
                gives_old = epoch == number == 0 and self.spec.first_pass_gives_old_logprobs
                for batch in minibatch.passes:
                    self.add_pass(minibatch, batch, advantage, ledger, metrics, gives_old=gives_old)
                rate = self.next_learning_rate()
                norm = self.components.learner.update(learning_rate=rate)
                self.state.updates += 1
                if math.isfinite(norm):
                    self.state.skipped_in_a_row = 0
                    metrics.update_done(norm)
                    continue
                which = f"update {number + 1} of epoch {epoch + 1}"
                self.skip_update(f"{which}: the gradient norm is {norm}, the loss so far {metrics.loss}")
                metrics = before
                metrics.num_skipped += 1
        if metrics.num_skipped:
            which = f"{metrics.num_skipped} of {self.updates_per_step} updates were skipped"
            self.recorder.event(self.state.step, "updates_skipped", f"{which}: their gradients were not finite")
        return metrics, rate

    def add_pass(
        self,
        minibatch: Minibatch,
        batch: Microbatch,
        advantage: Tensor,
        ledger: TokenLedger,
        metrics: UpdateMetrics,
        *,
        gives_old: bool,
    ) -> None:
        """Adds one pass's gradient to that of its update, and the pass's values to token table and metrics.

        Nothing here reads a value or copies one to the host, so the next pass starts before this one ends.

        Args:
            gives_old: whether the pass's logprobs are also the old logprobs.
        """
        state = None
        objective = self.spec.objective
        if ledger.reference and isinstance(objective, RegularizedObjective):
            passes, rows = self.components.learner.passes, ledger.reference.read(batch)
            logprobs, entropies, state, ref_logprobs = passes.compared(batch, objective.divergence, rows)
            self.write_ref_logprobs(batch, ref_logprobs, ledger)
        else:
            logprobs, entropies = self.components.learner.logprobs(batch)
        if gives_old:
            ledger.write(batch, old_logprobs=logprobs)
        tokens = self.tokens(batch, logprobs, advantage, ledger, state)
        result = pass_loss(self.spec_now, minibatch, batch, tokens, entropies)
        routing = self.components.learner.routing
        loss = result.loss
        if routing and minibatch.expert_counts is not None and batch.counts:
            balance = balancing_loss(minibatch.expert_counts, routing.probabilities, minibatch.num_tokens)
            loss = loss + self.components.learner.balancing * balance
        self.components.learner.backward(loss)
        per_token = {name: batch.pick(values) for name, values in result.diagnostics().items()}
        metrics.add(batch, {**per_token, "entropy": entropies.detach()}, result.loss)
        if routing:
            metrics.add_routing(routing, counted=batch.counts)
        ledger.write(
            batch,
            logprobs=logprobs,
            entropies=entropies,
            ratios=per_token["ratio"],
            clipped=batch.pick(result.evaluation.clipped),
        )

    def skip_update(self, reason: str) -> None:
        """Counts an update that was skipped because its gradient is not finite.

        Raises:
            DivergedError, GuardStoppedError or RollBackRequested: the spec does not skip such updates, or too many
                consecutive updates, or all updates of the run so far, were skipped.
        """
        self.state.skipped_in_a_row += 1
        skipped = self.state.skipped_in_a_row
        skips = self.training.on_not_finite == "skip"
        if skips and skipped < min(MOST_SKIPPED_IN_A_ROW, self.training.steps * self.updates_per_step):
            self.progress.say(f"step {self.state.step}, {reason}; the update is skipped")
            return
        row = f"; {skipped} updates in a row had to be skipped" if skips else ""
        message = f"{reason}{row}; nothing of this step is saved"
        raise self.exception_for(self.components.guards.fire_not_finite(self.state.step, message))

    def tokens(
        self,
        batch: Microbatch,
        logprobs: Tensor,
        advantage: Tensor,
        ledger: TokenLedger,
        state: StateDivergence | None = None,
    ) -> TokenBatch:
        """Returns a pass's tokens as inputs of the objective. If the sampling policy is the reference, the reference
        logprobs are the old logprobs."""
        old = batch.spread(ledger.read("old_logprobs", batch))
        return TokenBatch(
            logprobs=batch.spread(logprobs),
            old_logprobs=old,
            ref_logprobs=batch.spread(ledger.read("ref_logprobs", batch)) if self.components.reference else old,
            advantages=batch.spread(batch.look_up(advantage).to(old)),
            response_mask=batch.response_mask,
            state=state and state.each(batch.spread),
        )

    def next_learning_rate(self) -> float:
        """Returns the learning rate of the next update: the schedule's, lowered by the roll-backs so far."""
        return self.components.guards.learning_rate_factor(self.state.step) * learning_rate(
            self.training.schedule,
            peak=value_at(self.training.optimizer.learning_rate, self.state.step),
            update=self.state.updates,
            num_updates=self.training.steps * self.updates_per_step,
        )

    def sync(self) -> None:
        """Loads the new weights into the sampler. A separate engine must prove that they arrived."""
        self.state.policy_version += 1
        self.source.wait()
        self.components.give_sampler_weights(self.state.policy_version)

    def evaluation_is_due(self) -> bool:
        """Returns whether the policy must be evaluated now and was not evaluated yet. After the last step, the evaluate
        stage does it."""
        step, every = self.state.step, self.spec.evaluation.every_steps
        due = self.pausing or (every > 0 and 0 < step < self.training.steps and step % every == 0)
        return self.evaluates and due and not self.recorder.has_evaluated(step)

    def evaluate(self) -> None:
        """Evaluates the policy with the sampler, which is idle and has the policy's weights. This does not affect
        training, because the answers have their own seeds."""
        evaluated = self.components.evaluate()
        means = self.recorder.evaluation(self.state.step, evaluated)
        self.progress.evaluated(self.state.step, means)
        schedule, every = self.components.schedule, self.spec.evaluation.every_steps
        # An evaluation at a pause does not count: without the pause, training would not evaluate at this step.
        counts = every and self.state.step % every == 0
        if counts:
            self.components.loops.follow(drift_figures(evaluated.drift or ()))
        if counts and schedule.reads_evaluations and schedule.after_evaluation(scores_by_set(evaluated.answered)):
            self.move_weights_of_reference()

    @property
    def state_follows_evaluations(self) -> bool:
        """Returns whether the state in a checkpoint depends on the evaluation of its step."""
        drift = any(metric.startswith("drift/") for metric in self.components.loops.metrics)
        return drift or self.components.schedule.reads_evaluations

    def check_guards(self, metrics: dict[str, float]) -> Exception | None:
        """Records the guards that warn. Returns the exception that ends the step if a guard stops the run or rolls it
        back."""
        exception = None
        for fired in self.components.guards.check(self.state.step, metrics):
            if fired.guard.action == "warn":
                self.recorder.event(self.state.step, "guard_warned", fired.message)
                self.progress.say(f"warning: {fired.message}")
            else:
                exception = exception or self.exception_for(fired)
        return exception

    def exception_for(self, fired: FiredGuard) -> Exception:
        """Returns the exception that stops the run, or rolls it back, after a guard has fired."""
        if self.components.guards.may_roll_back(fired):
            return RollBackRequested(fired)
        tried = f", after {fired.guard.at_most} roll-back(s)" if fired.guard.action == "roll_back" else ""
        kind = DivergedError if fired.guard.metric == "not_finite" else GuardStoppedError
        return kind(f"{fired.message}{tried}")

    def roll_back(self, fired: FiredGuard) -> None:
        """Resets the run to its last checkpoint before the violation. The learning rate is lower from then on.

        Raises:
            GuardStoppedError: there is no such checkpoint.
        """
        bounds = self.components.guards.roll_back_bounds(fired)
        target = next((step for bound in bounds if (step := self.recorder.roll_back(self.state, up_to=bound))), 0)
        if not target:
            raise GuardStoppedError(
                f"{fired.message}; there is no checkpoint from before step {fired.since} to return to"
            )
        self.components.guards.record_roll_back(fired, target, write=ranks.rank() == 0)
        factor = self.components.guards.learning_rate_factor(target + 1)
        message = f"{fired.message}: back to step {target}, the learning rate times {factor:g} from there"
        self.recorder.event(target, "rolled_back", message)
        self.recorder.close()
        self.progress.say(message)

    def move_reference(self, kl_reverse: float | None) -> None:
        """Updates the reference from the current policy if its schedule says so. `kl_reverse`: the step's metric, None
        if it has none."""
        if self.components.schedule.after_step(kl_reverse, updates=self.updates_per_step):
            self.move_weights_of_reference()

    def move_weights_of_reference(self) -> None:
        """Updates the reference, after its schedule has counted the update. Clears the optimizer's moments if the spec
        says so."""
        schedule, reference = self.components.schedule, self.components.reference
        if reference is None:
            return
        reference.move(ema_decay=schedule.ema_decay)
        if schedule.resets_optimizer:
            self.components.learner.reset_optimizer()
        message = f"version {schedule.version} after step {self.state.step}: {schedule.reason}"
        self.recorder.event(self.state.step, "reference_moved", message)
