"""Private heads on features that are not trained."""

from tf_dpsub.heads.full_batch import FullBatch

__all__ = ["FullBatch"]
