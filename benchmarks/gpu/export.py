"""Writes training steps as StableHLO, which any XLA device can run.

    python -m benchmarks.gpu.export --workload=cnn --method=graph out/gpu

writes `out/gpu/cnn_graph.npz`, one file for each workload and method that is
named; `benchmarks.gpu.run` runs these files, without TensorFlow. The whole
step is one program: gradients, clipping, noise, the refresh of the subspace or
of the carriers, and the update of the weights. A batch is one microbatch.
"""

import argparse
import itertools
import pathlib
import re
import sys

import keras
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from benchmarks.gpu import step_file
from benchmarks.peers import tf_dpsub_steps, workloads
from tf_dpsub.gradients import precision

_METHODS = ("plain", "graph", "pdpsgd", "gep", "rgp")


def exported(workload, method, tensor_float_32=False):
    """The compiled step of a method on a workload.

    Args:
        workload: string, one of `benchmarks.peers.workloads.WORKLOADS`.
        method: string, one of `benchmarks.peers.tf_dpsub_steps.METHODS`.
        tensor_float_32: bool, whether a GPU may round the operands of products,
            and the step is traced for it. Defaults to `False`.

    Returns:
        `step_file.CompiledStep`, with what came out of it here.

    Raises:
        NotImplementedError: if there is no such step.
        ValueError: if a shape in it is not static.
    """
    with precision.tensor_float_32(tensor_float_32):
        return _exported(workload, method)


def _exported(workload, method):
    settings = {}
    if method != "plain":
        settings["microbatch_size"] = workloads.WORKLOADS[workload].batch
    model, dataset, *_ = tf_dpsub_steps.prepared(workload, method, **settings)
    batch = next(iter(dataset))
    function = tf.function(model.train_step, jit_compile=True, autograph=False)
    concrete = function.get_concrete_function(batch)
    stablehlo = _portable(
        function.experimental_get_compiler_ir(batch)(stage="stablehlo")
    )
    if "tensor<?" in stablehlo:
        raise ValueError(
            f"Expected static shapes in the step of {workload}, {method}."
        )
    trained = {id(v.value) for v in model.trainable_variables}
    variables = {id(v.handle): v for v in concrete.graph.variables}
    arguments = [
        step_file.Argument.like(t.numpy()) for t in tf.nest.flatten(batch)
    ]
    # Readers of the file draw the same numbers.
    data = [a.array(k) for k, a in enumerate(arguments)]
    captured = []
    for tensor in concrete.captured_inputs:
        variable = variables.get(id(tensor))
        captured.append(tensor if variable is None else variable)
        if variable is None:
            arguments.append(step_file.Argument.of(tensor.numpy()))
            continue
        argument = step_file.Argument.like(
            variable.numpy(), variable.name, id(variable) in trained
        )
        variable.assign(argument.array(len(arguments)))
        arguments.append(argument)
    returned = tf.nest.flatten(function(tf.nest.pack_sequence_as(batch, data)))
    written = _written(concrete)
    results = [*returned, *(captured[k - len(data)] for k in written)]
    return step_file.CompiledStep(
        workload=workload,
        method=method,
        stablehlo=stablehlo,
        arguments=arguments,
        updates=dict(enumerate(written, start=len(returned))),
        expected=[step_file.sample(r.numpy()) for r in results],
        cycle=tf_dpsub_steps.UPDATE_EVERY.get(method, 1),
    )


def _portable(program):
    """The program, in operations of StableHLO alone.

    TensorFlow writes one of another dialect among them, which a plugin of JAX,
    such as that of CUDA, does not take.
    """
    return re.sub(r"\bmhlo\.copy\b", "stablehlo.convert", program)


def _written(concrete):
    """Indices of the inputs of a function that are variables it assigns.

    XLA returns their values, in this order, after those of the function.
    """
    written = set()
    for op in concrete.graph.get_operations():
        _, assigned = auto_control_deps_utils.get_read_write_resource_inputs(op)
        written.update(id(t) for t in assigned)
    return [k for k, t in enumerate(concrete.inputs) if id(t) in written]


def main():
    """Runs the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    for name, choices in (
        ("workload", workloads.WORKLOADS),
        ("method", _METHODS),
    ):
        parser.add_argument(
            f"--{name}", action="append", choices=choices, help="all if none"
        )
    parser.add_argument(
        "--tensor_float_32",
        action="store_true",
        help="write steps for GPUs that round the operands of products",
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for workload, method in itertools.product(
        args.workload or workloads.WORKLOADS, args.method or _METHODS
    ):
        keras.backend.clear_session()
        try:
            step = exported(workload, method, args.tensor_float_32)
        except NotImplementedError as error:
            print(f"{workload}, {method}: {error}")
            continue
        suffix = "_tf32" if args.tensor_float_32 else ""
        file = args.folder / f"{workload}_{method}{suffix}.npz"
        step.write(file)
        print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
