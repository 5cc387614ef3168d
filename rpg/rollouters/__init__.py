"""From prompts to finished, scored responses: the environments that the policy samples in, of one turn or of several.

`rollouter` says what an environment does, `environments` holds ours, one a module, and `taking_turns` the turns of
those that speak with the policy; `journal` keeps what they said, and `scoring` has responses scored while others are
still sampled. An environment of a user's own is written as ours are, see docs/extending.md. Imports
rewards, `types`, data's seeds and the samplers' Protocol; rollouts and evaluation import it.
"""

from rpg.rollouters.rollouter import Rollouter, SeededPrompt
from rpg.rollouters.user import Remark, User
from rpg.types import Admit, OnResponse, Problem, Rollout, RolloutGroup, Sampling, Turn

__all__ = [
    "Admit",
    "OnResponse",
    "Problem",
    "Remark",
    "Rollout",
    "RolloutGroup",
    "Rollouter",
    "Sampling",
    "SeededPrompt",
    "Turn",
    "User",
]
