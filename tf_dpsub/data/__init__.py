"""Data for private training: named data sets and Poisson-sampled batches."""

from tf_dpsub.data.arrow_rows import ParquetRows
from tf_dpsub.data.datasets import Dataset, load
from tf_dpsub.data.once_per_epoch import OncePerEpoch
from tf_dpsub.data.persons import limit_rows
from tf_dpsub.data.poisson_batches import PoissonBatches
from tf_dpsub.data.public_images import load_images
from tf_dpsub.data.public_texts import load_texts
from tf_dpsub.data.random_images import dead_leaves
from tf_dpsub.data.record_rows import TFRecordRows
from tf_dpsub.data.sharded_rows import ShardedRows

__all__ = [
    "Dataset",
    "OncePerEpoch",
    "ParquetRows",
    "PoissonBatches",
    "ShardedRows",
    "TFRecordRows",
    "dead_leaves",
    "limit_rows",
    "load",
    "load_images",
    "load_texts",
]
