"""Runs compiled steps on the first device of JAX, and times them.

    python -m benchmarks.gpu.run out/gpu/*.npz --peers --write=out/gpu/results

`benchmarks.gpu.export` wrote the files. This program needs JAX alone: it hands
them to the compiler of the device, compares the first step with what came out
where the file was written, and times the steps that follow, each of which
takes what the last one returned. Every file has a process of its own; `--jobs`
of them compile at once, and when all have, one after the other runs. The
ceilings of the device are measured as well: a product of matrices, and a copy.

Products of float32 numbers have the precision that TensorFlow wrote, which
`--precision` replaces: `highest`, or `default`, for which GPUs round operands
to TF32.

`--peers` times JAX Privacy and Opacus on the same device and the same
workloads, if they are installed. What is measured is written as it comes.
"""

import argparse
import concurrent.futures
import functools
import io
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jaxlib import _jax
from jaxlib.mlir import ir

from benchmarks.gpu import step_file
from benchmarks.peers.workloads import WORKLOADS

_PEERS = {
    "benchmarks.peers.jax_steps": ("plain", "vmap"),
    "benchmarks.peers.opacus_steps": ("plain", "hooks", "ghost"),
}
_PRECISIONS = ("default", "highest")
_WARM_UPS, _FEWEST = 3, 5
_SHORTEST_BLOCK = 0.1


class LoadedStep:
    """A step on a device.

    Args:
        step: `step_file.CompiledStep`.
        device: of JAX.
        precision: string, of all products. Defaults to `None`, as written.

    Attributes:
        results: list of arrays, those of the last step.
    """

    def __init__(self, step, device, precision=None):
        self._step = step
        self._device = device
        self._updates = step.updates
        module = _module(step, precision)
        self._flop = _operations(module, device.client)
        self._executable = device.client.compile_and_load(
            module, _jax.DeviceList((device,)), _jax.CompileOptions()
        )
        # Not before the first step: other programs may be running till then.
        self._arguments = None
        self.results = None

    def __call__(self):
        """Starts one step, which may end later."""
        if self._arguments is None:
            self._arguments = [
                jax.device_put(a, self._device) for a in self._step.arrays()
            ]
        outputs = self._executable.execute_sharded(self._arguments)
        self.results = [
            arrays[0]
            for arrays in outputs.disassemble_into_single_device_arrays()
        ]
        for k, argument in self._updates.items():
            self._arguments[argument] = self.results[k]

    def finish(self):
        """Waits for the last step."""
        jax.block_until_ready(self.results)

    def costs(self):
        """XLA's count of operations and bytes of a step.

        Operations are those of the program as it was written: in what a device
        runs, those in calls of libraries are not counted.

        Returns:
            Two floats; None where XLA has no count.
        """
        analysis = self._executable.cost_analysis()
        return self._flop, analysis.get("bytes accessed")


def _operations(module, client):
    """The number of operations of a program, before it is compiled."""
    bytecode = io.BytesIO()
    with module.context:
        module.operation.write_bytecode(bytecode)
    program = _jax.mlir.mlir_module_to_xla_computation(bytecode.getvalue())
    counts = _jax.hlo_module_cost_analysis(client, program.get_hlo_module())
    return counts.get("flops")


def _module(step, precision):
    """The program, which may overwrite the arguments that it updates."""
    with mlir.make_ir_context():
        module = ir.Module.parse(_with_precision(step.stablehlo, precision))
        main = next(
            op for op in module.body.operations if op.name.value == "main"
        )
        index = ir.IntegerType.get_signless(32)
        attributes = [{} for _ in step.arguments]
        for k, argument in step.updates.items():
            output = ir.IntegerAttr.get(index, k)
            attributes[argument]["tf.aliasing_output"] = output
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(
            [ir.DictAttr.get(a) for a in attributes]
        )
    return module


def _with_precision(stablehlo, precision):
    """The program, all of whose products have a precision."""
    if precision is None:
        return stablehlo
    return re.sub(r"\b(?:DEFAULT|HIGHEST)\b", precision.upper(), stablehlo)


class Program:
    """The step of a file, compiled in a process of its own.

    Args:
        file: path.
        precision: string or None, as `LoadedStep` takes it.
    """

    def __init__(self, file, precision):
        self._file, self._precision = file, precision
        context = multiprocessing.get_context("spawn")
        self._connection, others = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(others, file, precision), daemon=True
        )
        self._process.start()
        others.close()
        self._result = self._received()

    def measured(self, seconds):
        """Runs the step for some seconds, and ends the process.

        Returns:
            dict of the results; of a step that failed, with the reason.
        """
        if "impossible" not in self._result:
            self._connection.send(seconds)
            self._result = self._received()
        self._process.join()
        return self._result

    def _received(self):
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            reason = f"its process ended with {self._process.exitcode}"
            described = step_file.CompiledStep.read(self._file)
            about = _about(described, self._precision)
            return about | {"impossible": reason}


def _about(described, precision):
    """What the result of a step begins with: dict of strings."""
    return {
        "workload": described.workload,
        "method": described.method,
        "precision": precision,
    }


def _serve(connection, file, precision):
    """Compiles a step, and times it when it is told for how many seconds."""
    described = step_file.CompiledStep.read(file)
    result = _about(described, precision)
    try:
        jax.config.update("jax_enable_x64", True)
        device = jax.devices()[0]
        began = time.perf_counter()
        step = LoadedStep(described, device, precision)
        result["compile_s"] = time.perf_counter() - began
        connection.send(result)
        seconds = connection.recv()
        result |= _measured(step, described, device, seconds)
    except Exception as error:  # pylint: disable=broad-exception-caught
        result["impossible"] = " ".join(str(error).split())[:300]
    connection.send(result)


def _measured(step, described, device, seconds):
    step()
    loss, change = described.errors([np.asarray(r) for r in step.results])
    flop, size = step.costs()
    ms = _times(step, step.finish, seconds, described.cycle)
    # A CPU has no such statistics.
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "loss_error": loss,
        "change_error": change,
        "flop": flop,
        "bytes": size,
        "ms": ms,
        "peak_mib": None if peak is None else peak / 2**20,
    }


def _times(step, finish, seconds, cycle=1):
    """Milliseconds per step of blocks of steps, for some seconds."""

    def block(count):
        start = time.perf_counter()
        for _ in range(count):
            step()
        finish()
        return time.perf_counter() - start

    block(_WARM_UPS)
    count = cycle * math.ceil(_SHORTEST_BLOCK / block(cycle))
    times = []
    end = time.perf_counter() + seconds
    while len(times) < _FEWEST or time.perf_counter() < end:
        times.append(1e3 * block(count) / count)
    return times


def ceilings(size, copied, seconds):
    """Highest speeds that the device reaches.

    Args:
        size: int, of the square matrices that are multiplied.
        copied: int, bytes of an array that is read and written.
        seconds: float, for each.

    Returns:
        dict: operations a second by type of numbers, and bytes a second.
    """
    speeds = {"device": jax.devices()[0].device_kind}
    for name, dtype, precision in (
        ("highest", "float32", "highest"),
        ("default", "float32", "default"),
        ("bfloat16", "bfloat16", "default"),
    ):
        key = jax.random.key(0)
        matrix = jax.random.normal(key, (size, size), dtype)
        product = functools.partial(jnp.matmul, precision=precision)
        ms = _best(lambda a, product=product: product(a, a), matrix, seconds)
        speeds[f"{name} flop/s"] = 2e3 * size**3 / ms
    array = jnp.zeros(copied // 4, jnp.float32)
    speeds["bytes/s"] = (
        2e3 * array.nbytes / _best(lambda a: a + 1, array, seconds)
    )
    return speeds


def _best(function, array, seconds):
    compiled = jax.jit(function)
    results = []

    def call():
        results[:] = [compiled(array)]

    return min(_times(call, lambda: results[0].block_until_ready(), seconds))


def of_peers(names, seconds):
    """Times of the steps of other libraries, each in a process.

    Args:
        names: iterable of strings, workloads.
        seconds: float, for each.

    Yields:
        dicts, as `benchmarks.peers.timing` prints them, with a reason where
        there is none.
    """
    for name, (module, methods) in itertools.product(names, _PEERS.items()):
        for method in methods:
            process = subprocess.run(
                [sys.executable, "-m", module, f"--workload={name}"]
                + [f"--method={method}", f"--seconds={seconds}"],
                capture_output=True,
                text=True,
                check=False,
            )
            if process.returncode == 0:
                yield json.loads(process.stdout.splitlines()[-1])
                continue
            error_line = (process.stderr.strip().splitlines() or ["no output"])[
                -1
            ]
            yield {
                "framework": module.rpartition(".")[2],
                "workload": name,
                "method": method,
                "impossible": error_line,
            }


def markdown(steps, best, peers):
    """A table of the results."""
    lines = [
        f"{best['device']}: products of matrices at "
        f"{best['highest flop/s'] / 1e12:.3g} TFLOP/s in float32, "
        f"{best['default flop/s'] / 1e12:.3g} in the device's default "
        "precision for float32, "
        f"{best['bfloat16 flop/s'] / 1e12:.3g} in bfloat16; copies at "
        f"{best['bytes/s'] / 1e9:.4g} GB/s.",
        "",
        "| workload | step | ms | × plain | of the product's speed | of the "
        "copy's | peak MiB | error: loss | change of weights |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    plain = {
        _of_plain(s): _median(s)
        for s in (*steps, *peers)
        if s["method"] == "plain" and "ms" in s
    }
    for s in (*steps, *peers):
        precision = s.get("precision")
        name = ", ".join(
            part
            for part in (s.get("framework", "tf_dpsub"), s["method"], precision)
            if part
        )
        title = WORKLOADS[s["workload"]].title
        if "ms" not in s:
            lines.append(_row(title, name, s["impossible"], *[""] * 6))
            continue
        ms = _median(s)
        cells = [title, name, f"{ms:.3g}", _ratio(ms, plain.get(_of_plain(s)))]
        if "framework" in s:
            lines.append(_row(*cells, *[""] * 5))
            continue
        lines.append(_row(
            *cells,
            _share(s["flop"], ms, best[f"{precision or 'highest'} flop/s"]),
            _share(s["bytes"], ms, best["bytes/s"]),
            "" if s["peak_mib"] is None else f"{s['peak_mib']:,.0f}",
            f"{s['loss_error']:.1e}",
            f"{s['change_error']:.1e}",
        ))  # fmt: skip
    return "\n".join(lines) + "\n"


def _of_plain(result):
    """What a step and the plain step that it is compared with share."""
    return result.get("framework"), result["workload"], result.get("precision")


def _median(result):
    return float(np.median(result["ms"]))


def _ratio(ms, plain):
    return "" if plain is None else f"{ms / plain:.2f}"


def _share(count, ms, ceiling):
    return "" if count is None else f"{100 * 1e3 * count / ms / ceiling:.1f} %"


def _row(*cells):
    return f"| {' | '.join(cells)} |"


def main():
    """Runs the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each")
    parser.add_argument("--peers", action="store_true", help="time them too")
    parser.add_argument("--size", type=int, default=8192, help="of matrices")
    parser.add_argument("--copied", type=int, default=2**30, help="bytes")
    parser.add_argument("--write", type=pathlib.Path, help="a folder")
    parser.add_argument("--jobs", type=int, default=1, help="that compile")
    parser.add_argument(
        "--precision",
        action="append",
        choices=_PRECISIONS,
        help="of products of float32 numbers; as the files have it if none",
    )
    args = parser.parse_args()
    # The memory of a GPU is shared by all programs that have compiled.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    results = {"steps": [], "ceilings": {}, "peers": []}

    def keep(kind, result):
        results[kind].append(result)
        print(_summary(result), flush=True)
        if args.write:
            file = args.write / "results.json"
            file.write_text(json.dumps(results, indent=1))

    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        results["ceilings"] = pool.apply(
            ceilings, (args.size, args.copied, args.seconds)
        )
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        programs = list(
            pool.map(
                lambda one: Program(*one),
                itertools.product(args.files, args.precision or [None]),
            )
        )
    for program in programs:
        keep("steps", program.measured(args.seconds))
    if args.peers:
        names = dict.fromkeys(s["workload"] for s in results["steps"])
        for result in of_peers(names, args.seconds):
            keep("peers", result)
    table = markdown(results["steps"], results["ceilings"], results["peers"])
    print(table)
    if args.write:
        (args.write / "table.md").write_text(table, "utf-8")
    return 0


def _summary(result):
    name = ", ".join(
        result[k]
        for k in ("framework", "workload", "method", "precision")
        if result.get(k)
    )
    if "ms" not in result:
        return f"{name}: {result['impossible']}"
    text = f"{name}: {_median(result):.3g} ms"
    if "compile_s" not in result:
        return text
    return (
        f"{text}, compiled in {result['compile_s']:.0f} s; error of the loss "
        f"{result['loss_error']:.1e}, of the change of weights "
        f"{result['change_error']:.1e}"
    )


if __name__ == "__main__":
    sys.exit(main())
