"""Serves a model that scores: `python -m rpg.scoring_model CONNECTION PARENT SETTINGS`. Its clients start it.

It reads requests as JSON from the connection, computes all waiting requests together, and ends with the connection. A
judge writes a reply; a classifier returns a value. `rpg.rewards.judges.model_process` documents SETTINGS.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from rpg.data.chat_template import render
from rpg.data.plain_text import conversation_ids
from specs.machine.parent import before_torch, die_with_parent, own_threads

_LONGEST = 16384
"""Largest number of tokens of a request, unless the spec or the model sets a lower bound."""
_DIGITS = 4
"""Number of decimals to which a classifier's value is rounded, so that it does not depend on the other requests in its
batch."""
Request = dict[str, Any]
Reply = dict[str, Any]


class _Model(Protocol):
    def reply(self, requests: list[Request]) -> list[Reply]:
        """Returns one reply for each request, in their order."""
        ...


def main(connection: "Connection[Any, Any]", settings: dict[str, Any]) -> None:
    """Serves until the connection ends."""
    model: _Model = _Judge(settings) if settings["kind"] == "judge" else _Classifier(settings)
    while True:
        requests = [json.loads(connection.recv_bytes())]
        while len(requests) < settings["batch_size"] and connection.poll():
            requests.append(json.loads(connection.recv_bytes()))
        for request, reply in zip(requests, model.reply(requests), strict=True):
            connection.send_bytes(json.dumps({"number": request["number"], **reply}).encode())


class _Tokens:
    """A model's tokenizer and the longest input that it allows."""

    def __init__(self, directory: Path, max_length: int) -> None:
        from rpg.pretrained import config_of, context_of, tokenizer_of

        self.tokenizer = tokenizer_of(directory)
        context = context_of(config_of(directory)) or _LONGEST
        self.longest = min(context, max_length or _LONGEST)

    def of(self, messages: list[dict[str, Any]], *, prefix: str | None) -> list[int]:
        """Returns the token ids of a conversation. Contents of messages never become control tokens.

        Args:
            prefix: the beginning of the reply; None if no reply is requested.
        """

        def written(said: Sequence[str]) -> str:
            if not self.tokenizer.chat_template:
                return "\n\n".join(said) + ("\n" if prefix is not None else "") + (prefix or "")
            given = [message | {"content": text} for message, text in zip(messages, said, strict=True)]
            return render(self.tokenizer, given, add_generation_prompt=prefix is not None) + (prefix or "")

        ids = conversation_ids(self.tokenizer, [message["content"] for message in messages], written)
        return ids if self.tokenizer.chat_template else self._with_special(ids)

    def _with_special(self, ids: list[int]) -> list[int]:
        """Returns the token ids with those that the tokenizer adds around a text by default."""
        bare, whole = (self.tokenizer("a", add_special_tokens=adds)["input_ids"] for adds in (False, True))
        begin = next(place for place in range(len(whole)) if whole[place : place + len(bare)] == bare)
        return [*whole[:begin], *ids, *whole[begin + len(bare) :]]


class _Judge:
    """A decoder that writes replies, run by the engine that the settings name."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch

        from rpg.samplers import SamplerSettings, open_sampler
        from specs.schema.rollout import TransformersRollout, VllmRollout

        self._prefix = settings["prefix"]
        directory = Path(settings["directory"])
        self._tokens = _Tokens(directory, settings["max_length"])
        rollout: TransformersRollout | VllmRollout
        if settings["engine"] == "vllm":
            from rpg.samplers.vllm.engine_process import prepare

            prepare()
            share = settings["memory_fraction"] or None
            rollout = VllmRollout(engine="vllm", max_concurrent=settings["batch_size"], memory_fraction=share)
        else:
            rollout = TransformersRollout(max_concurrent=settings["batch_size"])
        device = torch.device(settings["device"])
        self._sampler = open_sampler(rollout, SamplerSettings(directory, device, self._tokens.longest, seed=0))

    def reply(self, requests: list[Request]) -> list[Reply]:
        """See _Model."""
        from rpg.types import Sampling

        prompts = [self._tokens.of(request["messages"], prefix=self._prefix) for request in requests]
        replies: list[Reply] = [{} for _ in requests]
        drawn: dict[Sampling, list[int]] = {}
        for index, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
            if len(prompt) + request["max_tokens"] > self._tokens.longest:
                room = (
                    f"{len(prompt)} + {request['max_tokens']} tokens are more than the judge's {self._tokens.longest}"
                )
                replies[index] = {"refused": room}
            else:
                drawn.setdefault(Sampling(request["temperature"], 1.0, request["max_tokens"]), []).append(index)
        for sampling, indices in drawn.items():
            groups = self._sampler.generate(
                [prompts[index] for index in indices],
                group_size=1,
                sampling=sampling,
                seeds=[requests[index]["seed"] for index in indices],
            )
            for index, group in zip(indices, groups, strict=True):
                ids = list(group.rollouts[0].response_ids)
                text = str(self._tokens.tokenizer.decode(ids, skip_special_tokens=True))
                replies[index] = {"text": text, "prompt_tokens": len(prompts[index]), "tokens": len(ids)}
        return replies


class _Classifier:
    """A sequence classifier of transformers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch

        from rpg.pretrained import classifier_of

        directory = Path(settings["directory"])
        self._tokens = _Tokens(directory, settings["max_length"])
        self._device = torch.device(settings["device"])
        dtype = torch.float32 if self._device.type == "cpu" else "auto"
        self._model = classifier_of(directory, dtype=dtype).to(self._device).eval()  # type: ignore[arg-type]
        pad = self._tokens.tokenizer.pad_token_id
        if pad is None:
            pad = self._tokens.tokenizer.eos_token_id or 0
            self._tokens.tokenizer.pad_token = self._tokens.tokenizer.convert_ids_to_tokens(pad)
        self._model.config.pad_token_id = pad  # the model finds the last token of each by it
        self._tokens.tokenizer.padding_side = "right"
        self._label = settings["label"]

    def reply(self, requests: list[Request]) -> list[Reply]:
        """See _Model."""
        import torch

        prompts = [self._tokens.of(request["messages"], prefix=None) for request in requests]
        fits = [index for index, ids in enumerate(prompts) if 0 < len(ids) <= self._tokens.longest]
        replies: list[Reply] = [
            {"refused": f"{len(ids)} tokens; the classifier takes 1 to {self._tokens.longest}"} for ids in prompts
        ]
        if fits:
            batch = self._tokens.tokenizer.pad({"input_ids": [prompts[index] for index in fits]}, return_tensors="pt")
            with torch.inference_mode():
                logits = self._model(**batch.to(self._device)).logits.float()
            values = logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, self._label]
            for index, value in zip(fits, values.tolist(), strict=True):
                replies[index] = {"value": round(value, _DIGITS)}
        return replies


def _begin(parent: int) -> None:
    """Prepares this process to serve. The trainer ends it; it ignores the signal that asks the run to finish a step."""
    before_torch()
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.dup2(2, 1)  # keeps a library's prints out of the trainer's output
    import torch
    import transformers

    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(own_threads(0, 1))


if __name__ == "__main__":
    _begin(int(sys.argv[2]))
    try:
        main(Connection(int(sys.argv[1])), json.loads(sys.argv[3]))
    except (EOFError, OSError):  # the clients are gone or done
        os._exit(0)
