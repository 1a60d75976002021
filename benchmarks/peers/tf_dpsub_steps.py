"""Steps of this package, and of Keras alone.

    python -m benchmarks.peers.tf_dpsub_steps --workload=cnn --method=graph

- `plain`: Keras's own step.
- `graph`: DP-SGD, gradients by a walk of the graph.
- `graph_at_once`: the same, the batch in one microbatch.
- `graph_compiled`: the same, compiled by XLA, which Keras's
  `jit_compile="auto"` does with a GPU alone.
- `vectorized_map`: DP-SGD, gradients by `tf.vectorized_map`.
- `pdpsgd`: rank 50 of 100 public examples, at every step.
- `gep`, `bgep`: the subspace of 2,000 public examples, at every tenth step;
  rank 500 by layer, of ResNet-20 rank 1,000 in five groups.
- `rgp`: carriers of rank 8, of WRN-28-4 of rank 16.
- `dp_powersgd`: of the same ranks.

Epochs are those of `fit`, which draws Poisson batches from arrays; of `plain`,
Keras's shuffled batches.
"""

import keras
import numpy as np
import tensorflow as tf

import tf_dpsub
from benchmarks import steps
from benchmarks.peers import timing, workloads
from tf_dpsub.training import microbatches

METHODS = (
    "plain",
    "graph",
    "graph_at_once",
    "graph_compiled",
    "vectorized_map",
    "pdpsgd",
    "gep",
    "bgep",
    "rgp",
    "dp_powersgd",
)
# Steps from one subspace to the next.
UPDATE_EVERY = {"gep": 10, "bgep": 10}
# Most memory for public gradients; a basis and its copies come on top.
_MOST_GIB = 4
_GEP_SUBSPACES = {
    "cnn": {"rank": 500, "groups": "layers"},
    "mlp": {"rank": 500, "groups": "layers"},
    "resnet20": {"rank": 1000, "groups": 5},
}


def built(workload, method):
    """Builds the step for `timing.main`."""
    model, dataset, *counts = prepared(workload, method)
    step = steps.step_of(model, dataset)
    calls = UPDATE_EVERY.get(method, 1)

    def finished():
        for _ in range(calls):
            logs = step()
        float(logs["loss"])

    return finished, *counts


def built_epoch(workload, method):
    """Builds the epoch for `timing.main`."""
    model, _, *counts = prepared(workload, method)
    _, x, y = steps.built(workload)
    count = workloads.WORKLOADS[workload].steps_of_epoch
    epoch = steps.epoch_of(model, x, y, count)
    return lambda: count * epoch(), *counts


def prepared(workload, method, **settings):
    """Model that is ready to train by a method.

    Args:
        workload: string.
        method: string, one of `METHODS`.
        **settings: of the private optimizer, beside those that all have.

    Returns:
        `keras.Model`, the dataset of its batches, and the numbers of all and
        of trained parameters.
    """
    model, x, y = steps.built(workload)
    counts = _counts(model.weights), _counts(model.trainable_variables)
    optimizer = keras.optimizers.SGD(0.01)
    if method != "plain":
        if method == "rgp":
            tf_dpsub.layers.reparametrize(model, _carrier_rank(workload))
        if method == "graph_at_once":
            if microbatches.default_size(model, len(y)) >= len(y):
                raise NotImplementedError("The batch is one microbatch anyway.")
            settings["microbatch_size"] = len(y)
        model = tf_dpsub.make_private(model)
        optimizer = _private(workload, method, optimizer, len(y), settings)
    dataset = steps.prepared(
        model,
        x,
        y,
        optimizer,
        metrics=(),
        jit_compile=True if method == "graph_compiled" else "auto",
    )
    return model, dataset, *counts


def _private(workload, method, inner, batch_size, settings):
    settings = {
        "l2_norm_clip": 1.0,
        "noise_multiplier": 1.0,
        "batch_size": batch_size,
        **settings,
    }
    if method == "vectorized_map" or method.startswith("graph"):
        implementation = "graph" if method.startswith("graph") else method
        return tf_dpsub.optimizers.DPSGD(
            inner, per_example=implementation, **settings
        )
    if method == "rgp":
        return tf_dpsub.optimizers.RGP(inner, **settings)
    if method == "dp_powersgd":
        rank = _carrier_rank(workload)
        return tf_dpsub.optimizers.DPPowerSGD(inner, rank=rank, **settings)
    if method == "pdpsgd":
        _check_memory(workload, 100)
        return tf_dpsub.optimizers.ProjectedDPSGD(
            inner,
            subspace=_subspace(workload, 100, rank=50, method="gram"),
            **settings,
        )
    _check_memory(workload, 2000)
    return tf_dpsub.optimizers.GEP(
        inner,
        subspace=_subspace(
            workload,
            2000,
            update_every=UPDATE_EVERY[method],
            **_GEP_SUBSPACES[workload],
        ),
        residual=method == "gep",
        **({"residual_norm_clip": 0.2} if method == "gep" else {}),
        **settings,
    )


def _check_memory(workload, examples):
    size = 4 * examples * workloads.WORKLOADS[workload].trained / 2**30
    if size > _MOST_GIB:
        raise NotImplementedError(
            f"{examples:,} public gradients of this model are {size:.1f} GiB."
        )


def _subspace(workload, examples, **settings):
    x, y = workloads.data(workload, examples, seed=1)
    return tf_dpsub.subspaces.PublicSubspace(x, y, **settings)


def _carrier_rank(workload):
    return 16 if workload == "wrn28_4" else 8


def _counts(weights):
    return sum(int(np.prod(w.shape)) for w in weights)


if __name__ == "__main__":
    timing.main(
        "tf_dpsub",
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}",
        METHODS,
        built,
        built_epoch,
        steps_per_call=lambda method: UPDATE_EVERY.get(method, 1),
    )
