"""How TensorFlow runs steps: what its optimizer is asked for."""

import keras
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context

from tests.training.plain_models import X, dpsgd, private
from tf_dpsub.training import execution

REWRITES = rewriter_config_pb2.RewriterConfig


def rewrites():
    """What a function that is called now is optimized by."""
    options = context.context().function_call_options
    config = config_pb2.ConfigProto.FromString(options.config_proto_serialized)
    return config.graph_options.rewrite_options


class Watching(keras.layers.Dense):
    """Notes by what options it is traced."""

    def build(self, shape):
        super().build(shape)
        self.seen = []

    def call(self, x):
        self.seen.append(rewrites())
        return super().call(x)


def test_a_step_is_optimized_once():
    """That of `fit`, and of nothing else; other options stay."""
    layer = Watching(2)
    plain = keras.Sequential([keras.Input(X.shape[1:]), layer])
    model = private(plain, dpsgd(batch_size=len(X)), loss="mse")
    tf.config.optimizer.set_experimental_options({"loop_optimization": False})
    try:
        model.fit(X, X[:, :2], verbose=0)
        last = layer.seen[-1]
        assert last.meta_optimizer_iterations == REWRITES.ONE
        assert last.loop_optimization == REWRITES.OFF
        default = rewrites()
        assert default.meta_optimizer_iterations == REWRITES.DEFAULT_NUM_ITERS
        assert default.loop_optimization == REWRITES.OFF
    finally:
        # The default.
        tf.config.optimizer.set_experimental_options(
            {"loop_optimization": True}
        )


def test_who_asks_for_a_number_of_times_gets_it():
    config = config_pb2.ConfigProto()
    wanted = config.graph_options.rewrite_options
    wanted.meta_optimizer_iterations = REWRITES.TWO
    assert execution._with_one_pass(config.SerializeToString()) == config
