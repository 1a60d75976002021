"""Runs compiled steps on the first device of JAX, and times them.

    python -m benchmarks.gpu.run out/gpu/*.npz --peers --write=out/gpu/results

`benchmarks.gpu.export` wrote the files. This program needs JAX alone: it hands
them to the compiler of the device, compares the first step with what came out
where the file was written, and times the steps that follow, each of which takes
what the last one returned. Every file has a process of its own. The ceilings of
the device are measured as well: a product of matrices, and a copy.

`--peers` times JAX Privacy and Opacus on the same device and the same
workloads, if they are installed.
"""

import argparse
import json
import math
import multiprocessing
import pathlib
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
_WARM_UPS, _FEWEST = 3, 5
_SHORTEST_BLOCK = 0.1


class LoadedStep:
    """A step on a device.

    Args:
        step: `step_file.CompiledStep`.
        device: of JAX.

    Attributes:
        results: list of arrays, those of the last step.
    """

    def __init__(self, step, device):
        self._updates = step.updates
        self._executable = device.client.compile_and_load(
            _module(step), _jax.DeviceList((device,)), _jax.CompileOptions()
        )
        self._arguments = [jax.device_put(a, device) for a in step.arrays()]
        self.results = None

    def __call__(self):
        """Starts one step, which may end later."""
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

        Returns:
            Two floats; None where XLA has no count.
        """
        analysis = self._executable.cost_analysis()
        return analysis.get("flops"), analysis.get("bytes accessed")


def _module(step):
    """The program, which may overwrite the arguments that it updates."""
    with mlir.make_ir_context():
        module = ir.Module.parse(step.stablehlo)
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


def measured(file, seconds):
    """Runs the step of a file, in the process that calls this.

    Args:
        file: path.
        seconds: float, how long to make steps.

    Returns:
        dict of the results.
    """
    jax.config.update("jax_enable_x64", True)
    device = jax.devices()[0]
    described = step_file.CompiledStep.read(file)
    began = time.perf_counter()
    step = LoadedStep(described, device)
    compiled = time.perf_counter() - began
    step()
    loss, change = described.errors([np.asarray(r) for r in step.results])
    flop, size = step.costs()
    results = {
        "workload": described.workload,
        "method": described.method,
        "device": device.device_kind,
        "jax": jax.__version__,
        "compile_s": compiled,
        "loss_error": loss,
        "change_error": change,
        "flop": flop,
        "bytes": size,
        "ms": _times(step, step.finish, seconds, described.cycle),
    }
    # A CPU has no such statistics.
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return results | {"peak_mib": None if peak is None else peak / 2**20}


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
    for dtype in ("float32", "bfloat16"):
        key = jax.random.key(0)
        matrix = jax.random.normal(key, (size, size), dtype)
        ms = _best(lambda a: a @ a, matrix, seconds)
        speeds[f"{dtype} flop/s"] = 2e3 * size**3 / ms
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

    Returns:
        List of dicts, as `benchmarks.peers.timing` prints them, with a reason
        where there is none.
    """
    results = []
    for name in names:
        for module, methods in _PEERS.items():
            for method in methods:
                process = subprocess.run(
                    [sys.executable, "-m", module, f"--workload={name}"]
                    + [f"--method={method}", f"--seconds={seconds}"],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if process.returncode == 0:
                    results.append(json.loads(process.stdout.splitlines()[-1]))
                    continue
                error_line = (
                    process.stderr.strip().splitlines() or ["no output"]
                )[-1]
                results.append({
                    "framework": module.rpartition(".")[2],
                    "workload": name,
                    "method": method,
                    "impossible": error_line,
                })  # fmt: skip
    return results


def markdown(steps, best, peers):
    """A table of the results."""
    lines = [
        f"{best['device']}: products of matrices at "
        f"{best['float32 flop/s'] / 1e12:.3g} TFLOP/s in float32 and "
        f"{best['bfloat16 flop/s'] / 1e12:.3g} in bfloat16, copies at "
        f"{best['bytes/s'] / 1e9:.4g} GB/s.",
        "",
        "| workload | step | ms | × plain | of the product's speed | of the "
        "copy's | peak MiB | error: loss | change of weights |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    plain = {
        (s.get("framework"), s["workload"]): _median(s)
        for s in (*steps, *peers)
        if s["method"] == "plain" and "ms" in s
    }
    for s in steps:
        ms = _median(s)
        lines.append(_row(
            WORKLOADS[s["workload"]].title,
            f"tf_dpsub, {s['method']}",
            f"{ms:.3g}",
            _ratio(ms, plain.get((None, s["workload"]))),
            _share(s["flop"], ms, best["float32 flop/s"]),
            _share(s["bytes"], ms, best["bytes/s"]),
            "" if s["peak_mib"] is None else f"{s['peak_mib']:,.0f}",
            f"{s['loss_error']:.1e}",
            f"{s['change_error']:.1e}",
        ))  # fmt: skip
    for s in peers:
        name = f"{s['framework']}, {s['method']}"
        title = WORKLOADS[s["workload"]].title
        if "ms" not in s:
            lines.append(_row(title, name, s["impossible"], *[""] * 6))
            continue
        ms = _median(s)
        ratio = _ratio(ms, plain.get((s["framework"], s["workload"])))
        lines.append(_row(title, name, f"{ms:.3g}", ratio, *[""] * 5))
    return "\n".join(lines) + "\n"


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
    args = parser.parse_args()
    steps = []
    # A process for each: memory is counted from its start.
    with multiprocessing.get_context("spawn").Pool(
        1, maxtasksperchild=1
    ) as pool:
        for file in args.files:
            steps.append(pool.apply(measured, (file, args.seconds)))
            print(_summary(steps[-1]), flush=True)
        best = pool.apply(ceilings, (args.size, args.copied, args.seconds))
    names = dict.fromkeys(s["workload"] for s in steps)
    peers = of_peers(names, args.seconds) if args.peers else []
    table = markdown(steps, best, peers)
    print(table)
    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
        results = {"steps": steps, "ceilings": best, "peers": peers}
        (args.write / "results.json").write_text(json.dumps(results, indent=1))
        (args.write / "table.md").write_text(table, "utf-8")
    return 0


def _summary(result):
    return (
        f"{result['workload']}, {result['method']}: {_median(result):.3g} ms, "
        f"compiled in {result['compile_s']:.0f} s; error of the loss "
        f"{result['loss_error']:.1e}, of the change of weights "
        f"{result['change_error']:.1e}"
    )


if __name__ == "__main__":
    sys.exit(main())
