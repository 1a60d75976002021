import keras
import numpy as np
import pytest

from tf_dpsub import make_private, optimizers
from tf_dpsub.planning import step_cost


def test_memory_follows_what_a_step_works_in():
    def cost(width):
        private = make_private(
            keras.Sequential(
                [
                    keras.Input([width]),
                    keras.layers.Dense(width, "relu"),
                    keras.layers.Dense(1),
                ]
            )
        )
        private.compile(
            optimizers.DPSGD(
                "sgd", noise_multiplier=1.0, l2_norm_clip=1.0, batch_size=64
            ),
            loss="mse",
        )
        x = np.ones([64, width], "float32")
        return step_cost.measure_step(private, x, x[:, :1])

    small, large = cost(64), cost(2048)
    assert large.state_bytes == pytest.approx(4 * 2048**2, rel=0.01)
    # Weights, sums of gradients in float64, and noise.
    added = large.memory_bytes - small.memory_bytes
    assert 4 * 4 * 2048**2 < added < 20 * 4 * 2048**2
