"""What is optimised: `token_losses`, and what may be seen of it while training, `diagnostics`."""

from rpg.objectives.diagnostics import diagnostics
from rpg.objectives.losses import token_losses

__all__ = ["diagnostics", "token_losses"]
