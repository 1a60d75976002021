"""Private heads on features that are not trained."""

from tf_dpsub.heads.full_batch import FullBatch
from tf_dpsub.heads.private_ridge import PrivateRidge
from tf_dpsub.heads.public_ridge import PublicRidge, fit_public_ridge

__all__ = ["FullBatch", "PrivateRidge", "PublicRidge", "fit_public_ridge"]
