"""Batches that tell which examples were drawn."""

import numpy as np

from tf_dpsub.data import PoissonBatches

EXAMPLES = 60


def batches_of(n=EXAMPLES, batch_size=12, seed=0):
    """Batches whose target is the index of the example."""
    x = np.random.default_rng(1).normal(size=(n, 2, 3)).astype("float32")
    return x, PoissonBatches(x, np.arange(n), batch_size=batch_size, seed=seed)


def drawn_indices(dataset, steps):
    """Indices of the drawn rows of each step."""
    drawn = []
    for batch in dataset.take(steps).as_numpy_iterator():
        drawn.append(batch["y"][batch["real"] == 1].tolist())
    return drawn
