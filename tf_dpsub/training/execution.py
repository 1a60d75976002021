"""Functions that run steps, of training and of evaluation, on all replicas."""

import contextlib
import functools
import itertools

import tensorflow as tf
from keras import tree
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context

from tf_dpsub.gradients.tracing import one_stack
from tf_dpsub.training import requirements
from tf_dpsub.training.claims import claims_of


def train_function(model):
    """Builds what `fit` calls for each block of `steps_per_execution` steps.

    Formal guarantees: no step runs before the run has charged for it, and none
    that was traced under other claims than those which the run has recorded:
    clips and noise are constants of the step. Nor does TensorFlow narrow what
    was proved, at no step.

    Args:
        model: compiled `PrivateModel`.

    Returns:
        Function of an iterator of batches; it returns the logs of training.
    """

    @tf.autograph.experimental.do_not_convert
    def train_step(data):
        with model.current_run.one_step():
            return model.train_step(data)

    one_step = _on_replicas(model, train_step)
    claims = claims_of(model.optimizer)

    @functools.cache
    def block_of(count):
        def block(iterator):
            for _ in range(count):
                logs = one_step(next(iterator))
            return logs

        return tf.function(block, autograph=False)

    def run_steps(iterator):
        run = model.current_run
        run.require_claims(claims)
        run.take_from(iterator)
        count = run.steps_at_once(model.steps_per_execution)
        if count == 0:
            model.stop_training = True
            return model._tallies.added_to(model.get_metrics_result())
        if count > 1 and not model.run_eagerly:
            requirements.require_full_precision()
            run.charge(count)
            return block_of(count)(iterator)
        for _ in range(count):
            data = next(iterator)
            # Whatever made the data may have changed it.
            requirements.require_full_precision()
            run.charge(1)
            logs = one_step(data)
        return logs

    run_steps.claims = claims
    return run_steps


def test_function(model):
    """Builds what `evaluate` calls for each block of steps.

    Keras's own fails on several workers, whose logs have no batch axis.

    Args:
        model: compiled `PrivateModel`.

    Returns:
        Function of an iterator of batches; it returns the logs of evaluation.
    """
    one_step = _on_replicas(model, model.test_step)

    def run_steps(iterator):
        logs = one_step(next(iterator))
        for data in itertools.islice(iterator, model.steps_per_execution - 1):
            logs = one_step(data)
        return logs

    return run_steps


def _on_replicas(model, step):
    """A function of a batch: it runs a step on all replicas."""
    strategy = model.distribute_strategy

    def reduce(value):
        if strategy.num_replicas_in_sync == 1:
            return value
        return strategy.reduce("MEAN", value, axis=None)

    # Who debugs, or whose model XLA cannot compile, looks for lines of code.
    needs_lines = model.run_eagerly or model.jit_compile
    traced_in = contextlib.nullcontext if needs_lines else one_stack

    def run(data):
        with traced_in():
            logs = strategy.run(step, args=(data,))
        return tree.map_structure(reduce, logs)

    if model.run_eagerly:
        return run
    traced = tf.function(run, autograph=False)

    def run_traced(data):
        with _optimized_once():
            return traced(data)

    return run_traced


@contextlib.contextmanager
def _optimized_once():
    """A context in which TensorFlow optimizes a new graph once, not twice.

    The second time takes almost as long, and finds hardly anything. Who has
    asked for a number of times gets it.
    """
    runtime = context.context()
    options = runtime.function_call_options
    own = context.FunctionCallOptions(
        options.executor_type, _with_one_pass(options.config_proto_serialized)
    )
    runtime.function_call_options = own
    try:
        yield
    finally:
        # Code that was traced may have set other ones.
        if runtime.function_call_options is own:
            runtime.function_call_options = options


@functools.lru_cache(maxsize=16)
def _with_one_pass(serialized):
    """The `ConfigProto` of a serialized one, with one pass for the default."""
    config = config_pb2.ConfigProto.FromString(serialized)
    rewrites = config.graph_options.rewrite_options
    if rewrites.meta_optimizer_iterations == rewrites.DEFAULT_NUM_ITERS:
        rewrites.meta_optimizer_iterations = rewrites.ONE
    return config
