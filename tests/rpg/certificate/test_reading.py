import re
from typing import Any

import pytest

from rpg.certificate.certificate import certify
from rpg.certificate.reading import in_words
from specs import parse_objective

CLAIMED = "expected reward less the unnormalized reverse KL of each token, in states of the sampler"


@pytest.mark.parametrize(
    ("objective", "settings", "meaning"),
    [
        (
            {"type": "rpg", "clip": {"type": "none"}},
            {"updates": 4},
            rf"In this run every update has on average exactly the gradient of {CLAIMED}\.",
        ),
        (
            {"type": "rpg"},
            {"updates": 1},
            rf"In this run every update is on policy, so that on average it has exactly the gradient of {CLAIMED}\.",
        ),
        (
            {"type": "rpg"},
            {"updates": 4},
            rf"In this run the first of the 4 updates of a step has on average exactly the gradient of {CLAIMED}\. "
            r"The later ones are near it, and up to \d+ % off where the policy has moved far: .*",
        ),
        (
            {"type": "rpg"},
            {"updates": 1, "max_staleness": 2},
            rf"In this run responses are up to 2 steps old: the gradient is near that of {CLAIMED}, and up to "
            r"\d+ % off .*",
        ),
        (
            {"type": "grpo"},
            {"updates": 2},
            r"This run's objective does not have the gradient of expected reward less the reverse KL of each token, in "
            r"states of the sampler and does not claim to: on average it is up to \d+ % off in the first update .*",
        ),
    ],
)
def test_a_certificate_says_what_it_means_for_a_run(
    objective: dict[str, Any], settings: dict[str, int], meaning: str
) -> None:
    said = in_words(certify(parse_objective(objective)).as_json(), **settings)["meaning"]
    assert re.fullmatch(meaning, said)


def test_a_claim_that_does_not_hold_is_said_plainly() -> None:
    certificate = certify(parse_objective({"type": "rpg"})).as_json() | {"holds": False}
    assert in_words(certificate, updates=1)["meaning"].endswith(": do not rely on it.")


@pytest.mark.parametrize("divergence", ["unnormalized_reverse", "reverse", "unnormalized_forward", "forward"])
def test_a_divergence_has_the_name_that_the_spec_gives_it(divergence: str) -> None:
    certificate = certify(
        parse_objective({"type": "rpg", "divergence": divergence, "clip": {"type": "none"}})
    ).as_json()
    worded = in_words(certificate, updates=1)
    name = f"{divergence.replace('_', ' ')} KL of each token"
    assert f"less the {name}" in worded["claimed"]
    assert {finding["divergence_gradient_of"] for finding in worded["findings"]} - {"nothing"} == {name}
