"""Several replicas follow the same carriers.

Logical devices must be made before TensorFlow starts: each test runs a
program of its own.
"""

import json
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.slow

_PROGRAM = """
import json, sys
import numpy as np
import tensorflow as tf

replicas, method, arguments = json.loads(sys.argv[1])
cpu = tf.config.list_physical_devices("CPU")[0]
devices = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, devices)
import keras
import tf_dpsub

strategy = tf.distribute.get_strategy()
if replicas == 2:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
rng = np.random.default_rng(0)
x = rng.normal(size=(40, 12)).astype("float32")
y = rng.integers(0, 6, 40)
with strategy.scope():
    keras.utils.set_random_seed(1)
    plain = keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(9, activation="tanh"),
            keras.layers.Dense(6),
        ]
    )
    if method == "RGP":
        tf_dpsub.layers.reparametrize(plain, 3)
    model = tf_dpsub.make_private(plain)
    model.compile(
        getattr(tf_dpsub.optimizers, method)(
            keras.optimizers.SGD(0.5, momentum=0.9),
            noise_multiplier=0.0, l2_norm_clip=0.3, batch_size=40, seed=1,
            **arguments,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
model.fit(x, y, epochs=6, verbose=0)
print(json.dumps([v.numpy().tolist() for v in plain.weights]))
"""


@pytest.mark.parametrize(
    "method, arguments",
    [
        ("RGP", {"warmup_steps": 2}),
        ("RGP", {"carriers": "random"}),
        ("DPPowerSGD", {"rank": 3}),
    ],
    ids=str,
)
def test_two_replicas_train_as_one(method, arguments):
    found = []
    for replicas in (1, 2):
        run = subprocess.run(
            [
                sys.executable,
                "-c",
                _PROGRAM,
                json.dumps([replicas, method, arguments]),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-3000:]
        found.append(json.loads(run.stdout.splitlines()[-1]))
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(two, one, atol=1e-4)
