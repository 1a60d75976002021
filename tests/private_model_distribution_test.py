"""Several replicas release one sum, with one draw of noise.

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

replicas, noise, steps_per_execution, epochs = json.loads(sys.argv[1])
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
with strategy.scope():
    keras.utils.set_random_seed(1)
    plain = keras.Sequential([keras.Input((40,)), keras.layers.Dense(3)])
    model = tf_dpsub.make_private(plain)
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(0.5, momentum=0.9),
            noise_multiplier=noise, l2_norm_clip=0.7, batch_size=41,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"], steps_per_execution=steps_per_execution,
    )
before = [v.numpy() for v in plain.trainable_variables]
history = model.fit(x, y, epochs=epochs, verbose=0, validation_data=(x, y))
after = [v.numpy() for v in plain.trainable_variables]
print(json.dumps({
    "change": np.concatenate(
        [np.ravel(a - b) for a, b in zip(after, before)]
    ).tolist(),
    "steps": model.ledger.steps,
    "evaluation": model.evaluate(x, y, verbose=0),
    "val_loss": history.history["val_loss"][-1],
}))
"""


def _train(replicas, noise=0.0, steps_per_execution=1, epochs=3):
    arguments = json.dumps([replicas, noise, steps_per_execution, epochs])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM), arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_two_replicas_train_as_one():
    """Every example is drawn (q = 1): sums over replicas are those of one."""
    one, two = _train(1), _train(2)
    np.testing.assert_allclose(two["change"], one["change"], rtol=1e-4)
    assert two["steps"] == one["steps"] == 3
    np.testing.assert_allclose(two["val_loss"], one["val_loss"], rtol=1e-4)
    np.testing.assert_allclose(two["evaluation"][0], two["val_loss"], rtol=1e-4)


def test_blocks_of_steps_over_replicas():
    one, two = _train(1), _train(2, steps_per_execution=2)
    np.testing.assert_allclose(two["change"], one["change"], rtol=1e-4)
    assert two["steps"] == 3


def test_noise_enters_once():
    """One step: its noise has the variance of one draw, not of two."""
    without = np.array(_train(2, epochs=1)["change"])
    noise = np.array(_train(2, noise=50.0, epochs=1)["change"]) - without
    stddev = 0.5 * 50.0 * 0.7 / 41  # lr * sigma * C / B
    ratio = np.mean(np.square(noise / stddev))  # 123 numbers
    assert 0.55 < ratio < 1.6
