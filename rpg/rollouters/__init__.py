"""Rollouters: environments in which the policy samples one or several turns. They turn prompts into finished, scored
responses.

`rollouter` defines what an environment does; `environments` holds ours, one a module. `taking_turns` runs the turns of
environments that speak with the policy, `journal` keeps what these said, and `scoring` scores responses while others
are still sampled. A user's own environment is written in the same way as ours, see docs/extending.md. The package
imports rewards, `types`, data's seeds and the samplers' Protocol; rollouts and evaluation import it.
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
