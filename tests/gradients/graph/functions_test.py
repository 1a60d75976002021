"""Bodies of the functions that a graph calls."""

import weakref

import tensorflow as tf

from tests import garbage
from tf_dpsub.gradients.graph import functions


def _graph_with_call():
    def call(x):
        return tf.function(tf.tanh, autograph=False)(x)

    outer = tf.function(call, autograph=False)
    return outer.get_concrete_function(tf.TensorSpec([3])).graph


def test_a_body_is_made_once():
    graph = _graph_with_call()
    (call,) = (o for o in graph.get_operations() if o.type in functions.CALLS)
    body = functions.body(call)
    assert functions.body(call) is body
    assert functions.around(body.graph) is body
    assert functions.around(graph) is None
    assert body.call is call


def test_bodies_end_with_their_graph():
    """They are kept by graph, and must not keep it: a graph is large."""
    graph = _graph_with_call()
    for op in graph.get_operations():
        if op.type in functions.CALLS:
            body = weakref.ref(functions.body(op))
    kept = weakref.ref(graph)
    del graph, op
    assert garbage.ends(kept)
    assert body() is None
