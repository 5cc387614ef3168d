"""Builds the parts of a trainer from a run's directory."""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rpg.base.teacher import teacher_directory
from rpg.control.loops import ClosedLoops
from rpg.data.chat_template import choose_template
from rpg.data.loading import encode_prompts, load_problems
from rpg.data.order import PromptOrder, order_of, seed_of
from rpg.evaluation.answers import answers, drift_responses
from rpg.evaluation.drift import (
    DriftSample,
    LogprobsOf,
    SampledResponse,
    drift_samples,
    keep_responses,
    kept_responses,
    response_logprobs,
)
from rpg.evaluation.inputs import EvaluationInputs, evaluation_inputs
from rpg.evaluation.records import Evaluated
from rpg.evaluation.sequences import token_logprobs_of
from rpg.guards import Guards
from rpg.learner.adapters import has_adapters, without_adapters
from rpg.learner.deepspeed import Learner, open_teacher
from rpg.learner.passes import Passes
from rpg.pretrained import config_of, context_of, tokenizer_of
from rpg.processes import ranks
from rpg.recording.run_directory import RunDirectory
from rpg.reference import ReferencePolicy, ReferenceSchedule, reference_policy
from rpg.rewards import Place, Scorer, open_scorers, refusals
from rpg.samplers import SamplerSettings, open_sampler
from rpg.samplers.base import Sampler
from rpg.samplers.sentinel import Sentinel, open_sentinel, probe_of
from rpg.types import Problem
from specs.errors import Issue, SpecError
from specs.schema.experiment import Experiment
from specs.schema.schedule import value_at

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class TrainerComponents:
    """The loaded parts of a run, ready to use."""

    run: RunDirectory
    spec: Experiment
    seed: int
    device: torch.device
    tokenizer: "PreTrainedTokenizerBase"
    problems: Sequence[Problem]
    prompts: Sequence[Sequence[int]]
    """Token ids of each problem's prompt."""
    order: PromptOrder
    evaluation: EvaluationInputs | None
    """The evaluation sets; None if the spec names none."""
    sampler: Sampler
    scorer: Scorer
    learner: Learner
    reference: ReferencePolicy | None
    """The reference policy; None if it is the behaviour policy."""
    schedule: ReferenceSchedule
    loops: ClosedLoops
    """Closed loops, which make values of the spec follow a target."""
    guards: Guards
    """Guards that watch the metrics of every step."""
    sentinel: Sentinel | None
    """Check that the sampler has the learner's weights; None for a sampler that cannot have others."""

    @property
    def packs(self) -> bool:
        """Whether a pass may have several sequences in a row. Every model that computes the pass must allow this."""
        return self.learner.packs and (self.reference is None or self.reference.packs)

    def set_temperature(self, temperature: float) -> None:
        """Sets the temperature by which logits are divided in the logprobs of policy and reference."""
        self.learner.passes.set_temperature(temperature)
        if self.reference:
            self.reference.set_temperature(temperature)

    def give_sampler_weights(self, policy_version: int) -> None:
        """Loads the learner's weights into the sampler, and checks that it has them. All ranks call it."""
        self.sampler.load_weights(self.learner.weights(), policy_version=policy_version)
        self.check_sampler_weights()

    def check_sampler_weights(self) -> None:
        """Raises StaleEngineError if sampler and learner do not give the same logprobs. All ranks call it."""
        if self.sentinel:
            self.sentinel.check(self.sampler, self.learner.probe)

    def evaluate(self) -> Evaluated:
        """Returns the results of the sampler's policy on the evaluation sets. All ranks call it while the sampler is
        idle."""
        asked, spec = self.evaluation, self.spec
        if asked is None:
            return Evaluated([])
        answered = answers(spec, asked, self.tokenizer, self.sampler, self.scorer, self.device)
        drifts = spec.measures_drift and bool(answered)
        own = drift_responses(spec, asked, self.tokenizer, self.sampler, self.device, answered) if drifts else []
        self.sampler.forget()
        if not drifts and not asked.unanswered:
            return Evaluated(answered, [] if spec.measures_drift else None)
        self.sampler.sleep()
        logprobs = self._logprobs_by(self.learner.passes)
        scored = [found for each in asked.unanswered for found in each.scored(logprobs)]
        drift = self._drift(asked, own) if drifts else None
        self.give_sampler_weights(self.sampler.policy_version)
        return Evaluated(answered, drift, scored)

    def sample_before_training(self) -> None:
        """Stores responses of the policy before training, for the forward drift of later evaluations. All ranks call
        it before the first step."""
        if self.evaluation is None or not self.evaluation.problems or not self.spec.measures_drift:
            return
        found = drift_responses(self.spec, self.evaluation, self.tokenizer, self.sampler, self.device)
        self.sampler.forget()
        keep_responses(self.run, found)

    def _drift(self, asked: EvaluationInputs, own: list[SampledResponse]) -> list[DriftSample]:
        """Returns the policy's own responses and those that were sampled before training, with their logprobs under
        both policies. Runs that took their first steps from another run have none from before training."""
        before = kept_responses(self.run, asked.problems)

        def both(passes: Passes) -> list[list[float]]:
            return [response_logprobs(each, self._logprobs_by(passes)) for each in (own, before)]

        policy = both(self.learner.passes)
        with self._initial_passes() as passes:
            initial = both(passes)
        reverse = drift_samples(own, "reverse", policy[0], initial[0])
        return reverse + drift_samples(before, "forward", policy[1], initial[1])

    def _logprobs_by(self, passes: Passes) -> LogprobsOf:
        most = self.spec.training.microbatch_tokens
        return lambda sequences: token_logprobs_of(sequences, passes, self.device, most_tokens=most)

    @contextmanager
    def _initial_passes(self) -> Iterator[Passes]:
        """Yields passes of the policy before training, for use within the block. Loads its weights unless the learner
        has them."""
        if self.spec.reference.source == "initial" and self.reference:
            with self.reference.passes(self.learner.passes) as passes:
                yield passes
        elif has_adapters(self.learner.model):
            with without_adapters(self.learner.model), self.learner.passes.choosing_experts():
                yield self.learner.passes
        else:
            base = self.run.path / self.run.inputs()["base"]
            alone = self.spec.training.model_copy(update={"sequence_parallel_size": 1})
            yield open_teacher(base, alone, temperature=1.0, device=self.device)

    def sentinel_metrics(self) -> dict[str, float]:
        """Returns the distance of this rank's sampler from the learner at the last check, nats. Empty without a
        sentinel."""
        if self.sentinel is None:
            return {}
        return {"sentinel/difference": self.sentinel.difference, "sentinel/mean": self.sentinel.mean_difference}


@contextmanager
def open_components(run: RunDirectory, spec: Experiment, device: torch.device) -> Iterator[TrainerComponents]:
    """Loads the data, the base model and the engines, and closes them on exit.

    Raises:
        SpecError: the spec does not fit the data, the model or the number of ranks, or this machine is not allowed to
            score.
    """
    if issues := refusals(spec):  # checked before minutes of loading
        raise SpecError(*issues)
    seed = spec.seeds[0]
    _seed_everything(seed)
    inputs = run.inputs()
    base, data = run.path / inputs["base"], run.path / inputs["data"]
    tokenizer = tokenizer_of(base)
    choose_template(tokenizer, spec.data.prompt)
    problems = load_problems(data, "train", tokenizer, spec.data, spec.rollout.rollouter.shown_tools)
    prompts = encode_prompts(tokenizer, [problem.prompt for problem in problems], spec.data)
    max_length = max(map(len, prompts), default=0) + spec.rollout.max_response_length
    _check(spec, base, max_length)
    # Loaded even if training does not evaluate, so that errors in them show before training.
    evaluation = evaluation_inputs(spec, data, base, tokenizer) if spec.data.evaluation else None
    if evaluation and (spec.evaluation.every_steps or (inputs.get("until") and "evaluation" in inputs)):
        max_length = max(max_length, evaluation.max_length)
    temperature = value_at(spec.rollout.temperature, 1)
    learner = Learner(
        base,
        spec.training,
        temperature=temperature,
        device=device,
        lends_weights=spec.reference.source in ("initial", "snapshot"),
    )

    if spec.rollout.replay_routing:
        learner.replay_routing()

    def teacher() -> Passes:
        model = spec.reference.teacher
        assert model is not None, "the rules let no reference of source model be without a path"
        directory = teacher_directory(model, tokenizer, config_of(base))
        return open_teacher(directory, spec.training, temperature=temperature, device=device)

    settings = SamplerSettings(
        weights_dir=base,
        device=device,
        max_length=max_length,
        seed=seed,
        learner_model=learner.model if spec.rollout.reads_learner(spec.training.zero_stage) else None,
        beside_learner=True,
        precision=spec.training.precision,
    )
    with ExitStack() as closing:
        sampler = open_sampler(spec.sampling, settings)
        closing.callback(sampler.close)
        yield TrainerComponents(
            run=run,
            spec=spec,
            seed=seed,
            device=device,
            tokenizer=tokenizer,
            problems=problems,
            prompts=prompts,
            order=order_of(spec.data.order, len(problems), seed=seed_of(seed, 0)),
            evaluation=evaluation,
            sampler=sampler,
            scorer=closing.enter_context(open_scorers(spec, Place.of_run(run.path, device.type))),
            learner=learner,
            reference=reference_policy(spec.reference, learner.model, teacher),
            schedule=ReferenceSchedule.of(spec.reference, spec.evaluation.confidence),
            loops=ClosedLoops(spec),
            guards=Guards(spec.training.guards, run.guards),
            sentinel=open_sentinel(
                spec.rollout,
                probe_of(prompts[0], max_length=max_length),
                precision=spec.training.precision,
                device_type=device.type,
            ),
        )


def _seed_everything(seed: int) -> None:
    """Seeds the global random generators. Results do not depend on them, but a library may draw from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _check(spec: Experiment, base: Path, max_length: int) -> None:
    """Raises SpecError if the model's context is too short, or if a rank would have no prompt."""
    issues: list[Issue] = []
    context = context_of(config_of(base))
    if context is not None and max_length > context:
        longest = max_length - spec.rollout.max_response_length
        issues.append(
            Issue(
                "the model's context is too short for the longest prompt and a whole response",
                path=("rollout", "max_response_length"),
                given=f"{longest} + {spec.rollout.max_response_length} tokens",
                allowed=f"{context} tokens",
                hint="lower rollout.max_response_length or data.max_prompt_length",
            )
        )
    # Reading a spec checks the number of ranks in it; ranks started by hand may be another number.
    if ranks.world_size() > spec.training.prompts_per_step:
        issues.append(
            Issue(
                "more ranks were started than a step has prompts",
                path=("training", "prompts_per_step"),
                given=f"{ranks.world_size()} ranks for {spec.training.prompts_per_step} prompts",
                allowed=f"at most {spec.training.prompts_per_step} ranks",
                hint="start fewer ranks, or raise training.prompts_per_step",
            )
        )
    if issues:
        raise SpecError(*issues)
