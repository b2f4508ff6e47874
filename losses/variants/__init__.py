"""One file per variant. The import list is the registry's order: the founding four first."""

from losses.variants import reference  # isort: skip
from losses.variants import no_detach  # isort: skip
from losses.variants import full_reverse_kl  # isort: skip
from losses.variants import forward_kl  # isort: skip
from losses.variants import dapo, dr_grpo, gspo

__all__ = ["reference", "no_detach", "full_reverse_kl", "forward_kl", "dapo", "dr_grpo", "gspo"]
