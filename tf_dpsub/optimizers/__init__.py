"""Private optimizers: a mechanism around any Keras optimizer."""

from tf_dpsub.optimizers.dpsgd import DPSGD
from tf_dpsub.optimizers.gep import GEP
from tf_dpsub.optimizers.private_optimizer import PrivateOptimizer
from tf_dpsub.optimizers.projected_dpsgd import ProjectedDPSGD

__all__ = ["DPSGD", "GEP", "PrivateOptimizer", "ProjectedDPSGD"]
