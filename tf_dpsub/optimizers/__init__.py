"""Private optimizers: a mechanism around any Keras optimizer."""

from tf_dpsub.optimizers.adaptive_dpsgd import AdaptiveDPSGD
from tf_dpsub.optimizers.dp_powersgd import DPPowerSGD
from tf_dpsub.optimizers.dpsgd import DPSGD
from tf_dpsub.optimizers.gep import GEP
from tf_dpsub.optimizers.private_optimizer import PrivateOptimizer
from tf_dpsub.optimizers.projected_dpsgd import ProjectedDPSGD
from tf_dpsub.optimizers.rgp import RGP

__all__ = [
    "AdaptiveDPSGD",
    "DPPowerSGD",
    "DPSGD",
    "GEP",
    "PrivateOptimizer",
    "ProjectedDPSGD",
    "RGP",
]
