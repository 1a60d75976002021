"""Private heads on features that are not trained."""

from tf_dpsub.heads.full_batch import FullBatch
from tf_dpsub.heads.private_ridge import PrivateRidge

__all__ = ["FullBatch", "PrivateRidge"]
