"""Checks that a formula's value and gradient are finite for advantages of 0 and log-ratios of +-50 nats."""

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from rpg.objectives import TokenBatch, token_losses
from rpg.objectives.formula import program
from rpg.objectives.terms import TERMS
from specs.errors import Issue, Path
from specs.schema.objective import FormulaObjective, Objective, PackagedObjective
from specs.schema.schedule import at_step, schedules_in

EXTREME = 50.0
"""Largest tested log-ratio of a token or of a whole response, nats."""
_LOG_RATIOS = (-EXTREME, -1.0, 0.0, 1.0, EXTREME)


def refused(objective: Objective) -> Issue | None:
    """Returns an issue, with a path in the spec, if a formula cannot be trained at some point of its schedules."""
    if not isinstance(objective, (FormulaObjective, PackagedObjective)):
        return None
    steps = {1}.union(*(schedule.phases() for _, schedule in schedules_in(objective)))
    for step in sorted(steps):
        if issue := not_finite(at_step(objective, step)):
            return replace(issue, path=("objective", *issue.path))
    return None


def not_finite(objective: FormulaObjective | PackagedObjective) -> Issue | None:
    """Returns an issue if an objective or its gradient is not finite in an enumerated case, or if it has no gradient.

    The issue's path leads into the objective.

    The cases are all combinations of advantages, rewards, entropies and log-ratios to the sampler, to the reference and
    of the engine, for responses of one and of three tokens. They are computed in float64, with log-ratios clamped at 60
    nats.
    """
    noun, hint = "objective", ""
    path: Path = ()
    if isinstance(objective, FormulaObjective):
        noun, path = "formula", ("weight" if objective.weight else "loss",)
        hint = "w, r or p must stand outside of sg() and of conditions"
    for length in (1, 3):
        batch = _cases(length)
        logprobs = batch.logprobs.clone().requires_grad_()
        inputs = {name: getattr(batch, name) for name in batch.__slots__ if name != "logprobs"}
        losses = token_losses(objective, logprobs=logprobs, **inputs)
        if not losses.requires_grad:
            return Issue(f"the {noun} has no gradient", path, hint=hint)
        (slopes,) = torch.autograd.grad(losses.sum(), logprobs)
        if not slopes.any():  # NaN counts as some
            return Issue(f"the {noun} has no gradient", path, hint="it is 0 in every enumerated case")
        bad = ~(losses.isfinite() & slopes.isfinite()).all(-1)
        if bad.any():
            what = "value" if not losses.isfinite().all() else "gradient"
            issue = Issue(f"the {noun}'s {what} is not finite", path, _described(batch, int(bad.nonzero()[0])))
            return _placed(issue, objective, batch) if isinstance(objective, FormulaObjective) else issue
    return None


def _placed(issue: Issue, objective: FormulaObjective, batch: TokenBatch) -> Issue:
    """Returns the issue, located at the formula's first operation whose result is not finite, else at the formula."""
    text = objective.weight or objective.loss
    compiled = program(objective)
    with torch.no_grad():
        values = compiled.values(TERMS[objective.ratio_over](batch.prepared()))
    column = 1
    for step, value in list(zip(compiled.steps, values, strict=True))[: compiled.steps_of_outcome]:
        if value.is_floating_point() and not value.isfinite().all():
            column = step.node.column
            break
    hint = "keep every part finite: a branch of `where` that is not taken has a gradient too; clip() bounds"
    return replace(issue, hint=hint, within=text, column=column)


def _cases(length: int) -> TokenBatch:
    """Returns a response for each combination. Its `length` tokens are equal, and their log-ratios add up to those of
    the combination."""
    signs, entropies, margins = (-1.0, 0.0, 1.0), (0.0, 0.5), (0.0, 0.1)
    grid = itertools.product(signs, _LOG_RATIOS, _LOG_RATIOS, _LOG_RATIOS, entropies, signs, margins)
    columns = torch.tensor(list(grid), dtype=torch.float64).unbind(-1)
    advantage, log_w, log_r, log_engine, entropy, reward, margin = columns

    def tokens(values: Tensor) -> Tensor:
        return values[:, None].expand(-1, length)

    # The largest probability of policy, sampler and engine is 1, or 0.9.
    largest = torch.stack([torch.zeros_like(log_w), log_w, -log_engine]).amax(0)
    old_logprobs = tokens(-largest / length - margin)
    logprobs = old_logprobs + tokens(log_w) / length
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        ref_logprobs=logprobs - tokens(log_r) / length,
        advantages=tokens(advantage),
        response_mask=torch.ones_like(logprobs),
        entropy=tokens(entropy),
        rollout_logprobs=old_logprobs - tokens(log_engine) / length,
        rewards=tokens(reward),
    )


def _described(batch: TokenBatch, row: int) -> str:
    """Returns a description of the case, without values that formulas rarely use."""
    log_w = (batch.logprobs - batch.old_logprobs)[row].sum().item()
    log_r = (batch.logprobs - batch.ref_logprobs)[row].sum().item()
    return f"A = {batch.advantages[row, 0].item():g}, log(w) = {log_w:.3g}, log(r) = {log_r:.3g}"
