"""Responses that continue in the next step: tokens, versions and weights against a replay, and exact resumes."""

import itertools
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3ForCausalLM

from pipelines.planning.fingerprint import train_identity
from rpg.data.order import PromptOrder, seed_of
from rpg.rollouts.partial import OpenGroups
from rpg.samplers.transformers.draws import draw, uniforms
from specs.schema.experiment import Experiment
from tests.rpg.checkpoints.test_resume import same_rows, wait_for_step
from tests.rpg.tiny_run import PROBLEMS, SPEC, STEADY, assert_trained, finish, make_inputs, make_run, rows, start, train

STEPS, GROUPS, SIZE, LONGEST = 6, 3, 4, 90
IN_FLIGHT = GROUPS * SIZE
EOS = 1
ASKED_EVERY = 16
"""Decoding steps between two questions whether the step has its groups."""
TRAINING: dict[str, Any] = {
    "steps": STEPS,
    "prompts_per_step": GROUPS,
    "group_size": SIZE,
    "minibatches": 1,
    "optimizer": {**STEADY, "learning_rate": 0.0003, "max_grad_norm": 1.0},
    "schedule": {"type": "constant"},
    "export_every_steps": 1,
    "checkpoint": {"every_steps": 2, "keep_last": 9},
}
ROLLOUT: dict[str, Any] = {"max_response_length": LONGEST, "max_staleness": 1, "partial": True}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model and its data."""
    directory = tmp_path_factory.mktemp("inputs")
    make_long(directory)
    return directory


def make_long(directory: Path, *, head_dim: int = 8) -> None:
    """A model whose responses are long: one token in twenty-five is the last."""
    make_inputs(directory, head_dim=head_dim)
    model = Qwen3ForCausalLM.from_pretrained(directory / "base")
    with torch.no_grad():  # hidden states share a direction, away from which the end token's row points
        embeddings = model.get_input_embeddings().weight
        embeddings += 0.02
        embeddings[EOS] = -0.04
    model.config.max_position_embeddings = 128
    model.save_pretrained(directory / "base")


def new_run(inputs: Path, where: Path, *, training: dict[str, Any] | None = None, **rollout: Any) -> Path:
    objective = {"type": "rpg", "divergence": "none", "clip": {"type": "none"}}
    advantage = {"baseline": "group_mean", "scale": "none"}
    changes = {"objective": objective, "advantage": advantage, "reference": {"source": "behaviour", "update": None}}
    reward = {"overlong": {"buffer": LONGEST, "penalty": 1.0}}  # so that the rewards of a group differ
    run = {"training": TRAINING | (training or {}), "rollout": ROLLOUT | rollout, "reward": reward}
    return make_run(inputs, where / "run", **run, **changes)


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    run_dir = new_run(inputs, tmp_path_factory.mktemp("whole"))
    train(run_dir)
    return run_dir


@dataclass
class Reply:
    """A response as the replay samples it."""

    prompt: list[int]
    seed: int
    member: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cut: int = 0
    """Tokens before the present step."""

    @property
    def ended(self) -> bool:
        return self.tokens[-1:] == [EOS] or len(self.tokens) == LONGEST

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.tokens

    def draw(self, logits: torch.Tensor, version: int) -> None:
        """The next token, given its logits. [vocabulary]"""
        noise = uniforms(seed_of(self.seed, self.member, self.cut), 0, 0)[len(self.tokens) - self.cut]
        token, logprob = draw(logits[None], torch.tensor([noise]), temperature=1.0, top_p=1.0)
        self.tokens.append(int(token))
        self.logprobs.append(float(logprob))
        self.versions.append(version)


class Replay:
    """The run in plain loops: whole passes for every token, and an optimizer of torch's own."""

    def __init__(self, inputs: Path, run_dir: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(inputs / "base")
        self.model = Qwen3ForCausalLM.from_pretrained(inputs / "base", dtype=torch.float32).eval()
        betas = (0.9, 0.999)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.0003, betas=betas, eps=STEADY["epsilon"], weight_decay=0.0
        )
        self.versions = [self.weights()]
        self.order = PromptOrder(len(PROBLEMS), seed=seed_of(0, 0))
        self.open: list[list[Reply]] = []
        self.rewards = {(row["step"], row["rollout_id"]): row["reward"] for row in rows(run_dir, "rollouts")}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def sample(self, step: int) -> list[list[Reply]]:
        """The step's groups; the others stay open."""
        version = max(0, step - 2)
        sampler = Qwen3ForCausalLM(self.model.config).eval()
        sampler.load_state_dict(self.versions[version])
        begun = itertools.count()
        for reply in itertools.chain(*self.open):
            reply.cut = len(reply.tokens)
        while sum(all(reply.ended for reply in group) for group in self.open) < GROUPS:
            while len(self.under_way()) + SIZE <= IN_FLIGHT:
                (problem,) = self.order.take(1)
                seed, ids = seed_of(0, step, next(begun)), self.tokenizer(PROBLEMS[problem])["input_ids"]
                self.open.append([Reply(ids, seed, member) for member in range(SIZE)])
            for _ in range(ASKED_EVERY):
                self.decode(sampler, version)
        ended = [group for group in self.open if all(reply.ended for reply in group)][:GROUPS]
        self.open = [group for group in self.open if group not in ended]
        return ended

    def decode(self, sampler: Qwen3ForCausalLM, version: int) -> None:
        """A token of each response under way, from one pass over the whole sequences without a cache."""
        if not (replies := self.under_way()):
            return
        longest = max(len(reply.ids) for reply in replies)
        ids = torch.tensor([reply.ids + [0] * (longest - len(reply.ids)) for reply in replies])
        with torch.no_grad():
            logits = sampler(input_ids=ids, use_cache=False).logits
        for reply, row in zip(replies, logits, strict=True):
            reply.draw(row[len(reply.ids) - 1], version)

    def under_way(self) -> list[Reply]:
        return [reply for group in self.open for reply in group if not reply.ended]

    def train(self, step: int, groups: list[list[Reply]]) -> list[float]:
        """An update: the mean over all tokens of -w A, w over the logprob of whichever policy sampled the token.
        Returns w of each token."""
        rewards = torch.tensor([self.rewards[step, number] for number in range(GROUPS * SIZE)]).view(GROUPS, SIZE)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().tolist()
        ratios: list[float] = []
        losses: list[torch.Tensor] = []
        for reply, advantage in zip(itertools.chain(*groups), advantages, strict=True):
            ids = torch.tensor([reply.prompt + reply.tokens])
            logits = self.model(input_ids=ids, use_cache=False).logits[0, len(reply.prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(reply.tokens)[:, None])[:, 0]
            ratio = torch.exp(logprobs - torch.tensor(reply.logprobs))
            losses.append(-ratio * advantage)
            ratios += ratio.tolist()
        torch.cat(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.versions.append(self.weights())
        return ratios


def test_tokens_versions_and_weights_are_those_of_a_replay_in_plain_loops(inputs: Path, whole: Path) -> None:
    replay, continued = Replay(inputs, whole), 0
    tokens = sorted(rows(whole, "tokens"), key=lambda row: (row["step"], row["rollout_id"], row["position"]))
    for step in range(1, STEPS + 1):
        groups = replay.sample(step)
        mine = [row for row in tokens if row["step"] == step]
        replies = list(itertools.chain(*groups))
        assert [row["token_id"] for row in mine] == [token for reply in replies for token in reply.tokens]
        assert [row["policy_version"] for row in mine] == [each for reply in replies for each in reply.versions]
        theirs = [logprob for reply in replies for logprob in reply.logprobs]
        assert np.allclose([row["rollout_logprob"] for row in mine], theirs, atol=2e-5)
        assert all(row["old_logprob"] == row["rollout_logprob"] for row in mine)
        assert np.allclose([row["ratio"] for row in mine], replay.train(step, groups), rtol=1e-4)
        exported = load_file(whole / f"weights/step-{step:06}/model.safetensors")
        for name, values in exported.items():
            assert torch.allclose(values.float(), replay.versions[step][name], atol=1e-5), (step, name)
        continued += sum(len(set(reply.versions)) > 1 for reply in replies)
    assert continued > STEPS, "responses have tokens of several policies"
    assert_trained(whole)


def test_the_record_tells_what_went_on(whole: Path) -> None:
    tokens = rows(whole, "tokens")
    metrics = {(row["step"], row["name"]): row["value"] for row in rows(whole, "metrics")}
    for step in range(1, STEPS + 1):
        ages = [step - 1 - row["policy_version"] for row in tokens if row["step"] == step]
        assert metrics[step, "staleness/max"] == max(ages)
        assert np.isclose(metrics[step, "staleness/mean"], np.mean(ages))
        versions = {
            number: {row["policy_version"] for row in tokens if (row["step"], row["rollout_id"]) == (step, number)}
            for number in range(GROUPS * SIZE)
        }
        share = np.mean([len(each) > 1 for each in versions.values()])
        assert np.isclose(metrics[step, "partial/continued_fraction"], share)
        for row in (row for row in rows(whole, "rollouts") if row["step"] == step):
            assert row["policy_version"] == min(versions[row["rollout_id"]])
    assert 0 < max(metrics[step, "partial/unfinished"] for step in range(1, STEPS + 1)) <= IN_FLIGHT
    assert max(metrics[step, "staleness/max"] for step in range(1, STEPS + 1)) > 1


def same_end(run_dir: Path, other: Path) -> None:
    """Final weights and optimizer, and every row, are equal in every bit."""
    state = Path("checkpoints") / f"step-{STEPS:06}" / "learner-rank00000.safetensors"
    mine, theirs = (load_file(run / state) for run in (run_dir, other))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine | theirs)
    same_rows(run_dir, other)


def test_a_stopped_run_goes_on_with_its_open_responses_bit_for_bit(inputs: Path, tmp_path: Path, whole: Path) -> None:
    stopped = new_run(inputs, tmp_path)
    (stopped / "cancel").touch()
    train(stopped, expect=143)
    opened = torch.load(stopped / "checkpoints/step-000001/open-rank00000.pt", weights_only=True)
    assert any(response["finish_reason"] is None for group in opened["groups"] for response in group["responses"])
    train(stopped)
    same_end(stopped, whole)


@pytest.mark.more
def test_a_killed_run_goes_on_bit_for_bit(inputs: Path, tmp_path: Path, whole: Path) -> None:
    killed = new_run(inputs, tmp_path)
    kill(killed)
    same_end(killed, whole)


def kill(run_dir: Path) -> None:
    """Kills a run after a checkpoint, and trains to the end."""
    process = start([sys.executable, "-m", "rpg.train", str(run_dir)])
    wait_for_step(process, run_dir, 4, saved=True)
    process.send_signal(signal.SIGKILL)
    finish(process, expect=-signal.SIGKILL)
    train(run_dir)
    assert len(list((run_dir / "attempts").glob("*.json"))) == 2


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("placement", ["colocated", "dedicated"])
def test_a_killed_run_with_vllm_goes_on_bit_for_bit(tmp_path: Path, placement: str) -> None:
    make_long(tmp_path, head_dim=32)
    rollout = {"engine": "vllm", "cpu_cache_gib": 0.25, "placement": placement}
    straight, killed = (new_run(tmp_path, tmp_path / name, **rollout) for name in ("straight", "killed"))
    train(straight)
    continued = [row["value"] for row in rows(straight, "metrics") if row["name"] == "partial/continued_fraction"]
    assert max(continued) > 0
    kill(killed)
    same_end(killed, straight)


@pytest.mark.more
def test_two_ranks_sample_what_one_does(inputs: Path, tmp_path: Path, whole: Path) -> None:
    """The first two steps are sampled under the first weights, which are equal in every bit."""
    run_dir = new_run(inputs, tmp_path, training={"steps": 2, "ranks": 2})
    train(run_dir, ranks=2)
    names = ("step", "rollout_id", "position", "token_id", "policy_version")
    one, two = (
        sorted(tuple(row[name] for name in names) for row in rows(run, "tokens") if row["step"] <= 2)
        for run in (whole, run_dir)
    )
    assert one == two


@pytest.mark.more
@pytest.mark.parametrize("ranks", [[1, 2], [2, 1]], ids=str)
def test_a_run_goes_on_with_another_number_of_ranks(inputs: Path, tmp_path: Path, ranks: list[int]) -> None:
    run_dir = new_run(inputs, tmp_path)
    (run_dir / "cancel").touch()
    train(run_dir, ranks=ranks[0], expect=143)
    train(run_dir, ranks=ranks[1])
    counts: dict[tuple[int, int], int] = {}
    for row in rows(run_dir, "tokens"):
        key = row["step"], row["rollout_id"]
        counts[key] = counts.get(key, 0) + 1
    told = {(row["step"], row["rollout_id"]): row["num_tokens"] for row in rows(run_dir, "rollouts")}
    assert counts == told
    assert len(told) == STEPS * GROUPS * SIZE


def test_the_number_of_responses_under_way_is_part_of_a_fingerprint() -> None:
    def identity(**rollout: Any) -> dict[str, Any]:
        training = {**SPEC["training"], "prompts_per_step": GROUPS, "group_size": SIZE, "minibatches": 1}
        spec = {**SPEC, "training": training, "rollout": {"max_staleness": 1, **rollout}}
        return dict(train_identity(Experiment.model_validate(spec)))

    assert identity(partial=True)["rollout.partial"] == IN_FLIGHT
    assert identity(partial=True, max_concurrent=7)["rollout.partial"] == SIZE
    assert identity(partial=True, max_concurrent=900) == identity(partial=True)
    assert "rollout.partial" not in identity()
    assert identity(max_concurrent=7) == identity()


def groups_of(samplers: Sequence[int], *, in_flight: int) -> OpenGroups:
    return OpenGroups(groups=2, group_size=4, in_flight=in_flight, samplers=samplers)


def begin(groups: OpenGroups) -> list[int]:
    on_ranks = groups.ranks_of_next()
    for rank in on_ranks:
        groups.begin(rank, problem=0, seed=0)
    return on_ranks


def test_groups_start_while_there_is_room_on_the_rank_with_the_fewest() -> None:
    groups = groups_of([1, 0, 1], in_flight=12)
    assert begin(groups) == [0, 2, 0]
    groups.note({0: 3})
    assert begin(groups) == [], "three places are too few for a group"
    groups.note({2: 1})
    assert begin(groups) == [0]
    groups.note({1: 2, 0: 1, 3: 4})
    assert begin(groups) == [2], "two are under way there, and three on the other"


def test_a_step_takes_the_groups_that_end_first_in_the_order_in_which_they_began() -> None:
    groups = groups_of([1], in_flight=16)
    begin(groups)
    groups.note({3: 4, 0: 3})
    assert not groups.has_step
    groups.note({2: 4, 1: 4})
    assert groups.has_step
    assert [group.number for group in groups.take()] == [1, 2]
    assert not groups.has_step
    groups.note({0: 1})
    assert [group.number for group in groups.take()] == [0, 3], "a group that has waited, and one that was slow"
