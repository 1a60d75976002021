"""Several replicas project on one subspace, with one draw of noise.

Logical devices must be made before TensorFlow starts: each test runs a
program of its own.
"""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest

pytestmark = pytest.mark.slow

_PROGRAM = """
import json, sys
import numpy as np
import tensorflow as tf

replicas, method, kind, noise, epochs = json.loads(sys.argv[1])
cpu = tf.config.list_physical_devices("CPU")[0]
devices = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, devices)
import keras
import tf_dpsub

strategy = tf.distribute.get_strategy()
if replicas == 2:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
rng = np.random.default_rng(0)
x = rng.normal(size=(41, 40)).astype("float32")
y = rng.integers(0, 3, 41)
public = rng.normal(size=(20, 40)).astype("float32")
subspace = {
    "public": lambda: tf_dpsub.subspaces.PublicSubspace(
        public, rank=6, groups="layers", update_every=2, seed=1
    ),
    "auto": lambda: tf_dpsub.subspaces.PublicSubspace(
        public, rank="auto", max_rank=6, horizon=10**6, seed=1
    ),
    "random": lambda: tf_dpsub.subspaces.RandomSubspace(
        100, update_every=2, seed=1
    ),
}[kind]()
arguments = dict(
    subspace=subspace, noise_multiplier=noise, l2_norm_clip=0.3, batch_size=41
)
if method == "GEP":
    arguments["residual_norm_clip"] = 0.5
if method == "ProjectedDPSGD" and epochs > 1:
    arguments["start_step"] = 1
with strategy.scope():
    keras.utils.set_random_seed(1)
    plain = keras.Sequential(
        [
            keras.Input((40,)),
            keras.layers.Dense(3, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )
    model = tf_dpsub.make_private(plain)
    model.compile(
        getattr(tf_dpsub.optimizers, method)(
            keras.optimizers.SGD(0.5, momentum=0.9), **arguments
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
before = [v.numpy() for v in plain.trainable_variables]
model.fit(x, y, epochs=epochs, verbose=0)
after = [v.numpy() for v in plain.trainable_variables]
change = np.concatenate([np.ravel(a - b) for a, b in zip(after, before)])
units = np.eye(subspace.rank, dtype="float32")
basis = [
    np.concatenate([np.ravel(t) for t in subspace.lift(u)]) for u in units
]
print(json.dumps({
    "change": change.tolist(),
    "coordinates": (np.array(basis) @ change).tolist(),
    "steps": model.ledger.steps,
}))
"""


def _train(replicas, method, kind, noise=0.0, epochs=4):
    arguments = json.dumps([replicas, method, kind, noise, epochs])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM), arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("kind", ["public", "auto", "random"])
@pytest.mark.parametrize("method", ["ProjectedDPSGD", "GEP"])
def test_two_replicas_train_as_one(method, kind):
    """Every example is drawn (q = 1): sums over replicas are those of one."""
    one, two = (_train(replicas, method, kind) for replicas in (1, 2))
    np.testing.assert_allclose(
        two["change"], one["change"], rtol=1e-3, atol=1e-5
    )
    assert two["steps"] == one["steps"] == 4
    assert np.linalg.norm(one["change"]) > 0.1


def test_noise_enters_once():
    """One step: its noise has the variance of one draw, not of two."""
    without, noisy = (
        np.array(_train(2, "ProjectedDPSGD", "random", sigma, 1)["coordinates"])
        for sigma in (0.0, 50.0)
    )
    stddev = 0.5 * 50.0 * 0.3 / 41  # lr * sigma * C / B
    ratio = np.mean(np.square((noisy - without) / stddev))  # 100 numbers
    # One in 1e4 on either side; two draws would give 2.
    assert 0.52 < ratio < 1.62
