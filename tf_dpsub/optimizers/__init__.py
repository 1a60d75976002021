"""Private optimizers: a mechanism around any Keras optimizer."""

from tf_dpsub.optimizers.dpsgd import DPSGD
from tf_dpsub.optimizers.private_optimizer import PrivateOptimizer

__all__ = ["DPSGD", "PrivateOptimizer"]
