"""Traces of functions: those thrown away, and those that many calls share."""

import contextlib
import functools
import threading
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.ops import control_flow_util
from tensorflow.python.util import tf_stack

from tf_dpsub.gradients import precision

_INTEGERS = (tf.int32.as_datatype_enum, tf.int64.as_datatype_enum)


def is_in_xla() -> bool:
    """Whether XLA compiles the graph that is being traced."""
    graph = tf.compat.v1.get_default_graph()
    return control_flow_util.GraphOrParentsInXlaContext(graph)


def trace(function: Callable, inputs):
    """Traces a function of one replica.

    Args:
        function: callable of one argument.
        inputs: structure of tensors or `tf.TensorSpec`s.

    Returns:
        The concrete function. Over several replicas, it returns what the first
        one does.
    """
    specs = tf.nest.map_structure(
        lambda t: tf.TensorSpec(t.shape, t.dtype), inputs
    )

    def first_replica(batch):
        strategy = tf.distribute.get_strategy()
        outputs = strategy.run(function, (batch,))
        return tf.nest.map_structure(
            lambda t: strategy.experimental_local_results(t)[0], outputs
        )

    over_replicas = tf.distribute.in_cross_replica_context()
    traced = tf.function(
        first_replica if over_replicas else function, autograph=False
    )
    with one_stack():
        return traced.get_concrete_function(specs)


@contextlib.contextmanager
def one_stack():
    """A context in which operations do not record the lines that made them.

    TensorFlow's errors name these lines, but those of a private step are
    replaced, as they quote examples. To record them takes a tenth of a trace.
    """
    extract, thread, is_open = (
        tf_stack.extract_stack,
        threading.get_ident(),
        True,
    )
    same = extract()

    def extract_once(stacklevel=1):
        # Another thread may have put its own over this one, and keep it.
        if is_open and threading.get_ident() == thread:
            return same
        return extract(stacklevel + 1)

    tf_stack.extract_stack = extract_once
    try:
        yield
    finally:
        is_open = False
        if tf_stack.extract_stack is extract_once:
            tf_stack.extract_stack = extract


@contextlib.contextmanager
def operations_from(make: Callable):
    """A context in which a function creates the operations of a graph.

    Args:
        make: function of what creates one here otherwise, and of its arguments:
            the type, the list of inputs, and others that it passes on. It
            returns a `tf.Operation`.
    """
    graph = tf.compat.v1.get_default_graph()
    with _replaced(graph, "_create_op_internal", make):
        yield


@contextlib.contextmanager
def shared_integers():
    """A context in which an integer constant is created once in a graph.

    Shapes and axes are a third of the operations of a step, and mostly equal:
    each takes time when it is traced, optimized and placed. Nothing can be
    differentiated by them, so that nobody can tell one from another.
    """
    kept: dict = {}
    is_capturing = False

    def create_once(create, op_type, *args, **kwargs):
        attrs = kwargs.get("attrs")
        if (
            op_type != "Const"
            or attrs is None
            or attrs["dtype"].type not in _INTEGERS
            or is_capturing
        ):
            return create(op_type, *args, **kwargs)
        key = attrs["value"].SerializeToString(deterministic=True)
        if key not in kept:
            # It has to wait for nothing that its first reader waits for.
            with tf.control_dependencies(None):
                kept[key] = create(op_type, *args, **kwargs)
        return kept[key]

    def capture(original, *args, **kwargs):
        # A small array from outside becomes a constant, too, but one that is an
        # input of the function.
        nonlocal is_capturing
        before, is_capturing = is_capturing, True
        try:
            return original(*args, **kwargs)
        finally:
            is_capturing = before

    graph = tf.compat.v1.get_default_graph()
    with operations_from(create_once), _replaced(graph, "capture", capture):
        yield


@contextlib.contextmanager
def _replaced(graph, name, function):
    """A context in which a method of a graph is a function of the one before.

    Contexts within one another end in order, as all of one trace do.
    """
    original = getattr(graph, name)
    setattr(graph, name, functools.partial(function, original))
    try:
        yield
    finally:
        setattr(graph, name, original)


def traced_by_shape(function: Callable):
    """A function that is traced once in a process for tensors of some shapes.

    To build many operations again for each of many layers takes most of the
    time before the first step; a call of what was traced is one.

    Args:
        function: callable of tensors of static shapes, of which alone its
            outputs depend.

    Returns:
        Callable of the same.
    """

    @functools.lru_cache(maxsize=1024)
    def traced(narrowed, *specs):
        with tf.init_scope():
            return tf.function(function, autograph=False).get_concrete_function(
                *specs
            )

    @functools.wraps(function)
    def call(*tensors):
        specs = (tf.TensorSpec(t.shape, t.dtype) for t in tensors)
        return traced(precision.narrowed(), *specs)(*tensors)

    return call
