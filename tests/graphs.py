"""Graphs of private steps, and what depends on what in them."""

import tensorflow as tf

import tf_dpsub


def recorded_steps(monkeypatch):
    """A list that receives the graph of each step that is traced."""
    graphs = []
    train_step = tf_dpsub.PrivateModel.train_step

    def traced(model, batch):
        logs = train_step(model, batch)
        graphs.append(tf.compat.v1.get_default_graph())
        return logs

    monkeypatch.setattr(tf_dpsub.PrivateModel, "train_step", traced)
    return graphs


def ancestors(op):
    """Set of the operations that one waits for, itself included."""
    seen, pending = set(), [op]
    while pending:
        op = pending.pop()
        if op not in seen:
            seen.add(op)
            pending += [i.op for i in op.inputs] + list(op.control_inputs)
    return seen
