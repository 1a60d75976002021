"""Compiled steps run without TensorFlow, with the same results."""

import dataclasses
import functools
import json
import random
import secrets
import subprocess
import sys

import jax
import keras
import numpy as np
import pytest
from jaxlib import _jax

from benchmarks import steps
from benchmarks.gpu import export, run, step_file
from benchmarks.peers import tf_dpsub_steps, workloads

WORKLOAD = "cnn"


@pytest.fixture(autouse=True, scope="module")
def _small():
    """Few examples, few layers, and a subspace of few dimensions.

    Each layer takes XLA seconds, whatever its size.
    """
    with pytest.MonkeyPatch.context() as patch:
        _make_small(patch)
        patch.setattr(_jax, "CompileOptions", _quick_to_compile)
        yield


def _quick_to_compile(original=_jax.CompileOptions):
    """Options of a compiler that takes no time to make programs fast."""
    options = original()
    debug = options.executable_build_options.debug_options
    debug.xla_backend_optimization_level = 0
    return options


def _few_layers():
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 8, 4, use_bias=False),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def _make_small(monkeypatch):
    monkeypatch.setitem(steps._OF_IMAGES, WORKLOAD, _few_layers)
    few = dataclasses.replace(workloads.WORKLOADS[WORKLOAD], batch=12)
    monkeypatch.setitem(workloads.WORKLOADS, WORKLOAD, few)
    monkeypatch.setitem(
        tf_dpsub_steps._GEP_SUBSPACES,
        WORKLOAD,
        {"rank": 8, "groups": "layers"},
    )
    original = tf_dpsub_steps._subspace

    def subspace(workload, examples, **settings):
        settings["rank"] = 8
        return original(workload, 16, **settings)

    monkeypatch.setattr(tf_dpsub_steps, "_subspace", subspace)


def _exported(method, **settings):
    """A step whose weights and noise are the same, whenever it is made."""
    keras.utils.set_random_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "randbits", random.Random(0).getrandbits)
        return export.exported(WORKLOAD, method, **settings)


@pytest.fixture(name="file_of", scope="module")
def _file_of(tmp_path_factory):
    """A function of a method: the file of its step, which is made once."""
    folder = tmp_path_factory.mktemp("steps")

    @functools.cache
    def file_of(method):
        file = folder / f"{method}.npz"
        _exported(method).write(file)
        return file

    return file_of


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, marks=() if m == "plain" else pytest.mark.slow)
        for m in export._METHODS
    ],
)
def test_result_is_that_of_tensorflow(method, file_of):
    step = step_file.CompiledStep.read(file_of(method))
    with jax.enable_x64(True):
        loaded = run.LoadedStep(step, jax.devices("cpu")[0])
        loaded()
        first = [np.asarray(r) for r in loaded.results]
        loss, change = step.errors(first)
        assert loss < 1e-5
        assert change < 1e-3
        # The next step starts where the last one ended.
        loaded()
        (iteration,) = [
            k
            for k, argument in step.updates.items()
            if step.arguments[argument].name.endswith("iteration:0")
        ]
        assert first[iteration] == 1
        assert loaded.results[iteration] == 2
    trained = [a for a in step.arguments if a.is_trained]
    assert (
        sum(np.prod(a.shape) for a in trained)
        == 8 * 8 * 16 + (6 * 6 * 16 + 1) * 10
    )


@pytest.mark.slow
def test_step_for_gpus_that_round(file_of):
    """It says so of its products, and computes what the other one does."""
    step = _exported("graph", tensor_float_32=True)
    assert "HIGHEST" not in step.stablehlo
    assert "and %" in step.stablehlo or "stablehlo.and" in step.stablehlo
    as_written = step_file.CompiledStep.read(file_of("graph"))
    assert "HIGHEST" in as_written.stablehlo
    assert as_written.stablehlo.count("dot_general") < (
        step.stablehlo.count("dot_general")
    )
    with jax.enable_x64(True):
        loaded = run.LoadedStep(step, jax.devices("cpu")[0])
        loaded()
        loss, change = as_written.errors(
            [np.asarray(r) for r in loaded.results]
        )
    assert loss < 1e-5
    # Factors of 11 bits, and a wider margin of the clip.
    assert change < 1e-2


def test_another_result_is_noticed(file_of):
    step = step_file.CompiledStep.read(file_of("plain"))
    results = step.expected
    assert step.errors(results) == (0, 0)
    for k, argument in step.updates.items():
        if step.arguments[argument].is_trained:
            # As if the step had not trained this weight.
            before = step.arguments[argument].array(argument)
            wrong = [*results]
            wrong[k] = step_file.sample(before)
            loss, change = step.errors(wrong)
            assert loss == 0
            assert change > 1e-3
    loss, change = step.errors([1.01 * results[0], *results[1:]])
    assert loss == pytest.approx(0.01, rel=1e-3)
    assert change == 0


class TestArgument:
    def test_large_ones_are_drawn(self):
        array = 3 + 2 * np.random.default_rng(0).normal(size=(300, 300))
        drawn = step_file.Argument.like(array.astype("float32"))
        assert drawn.value is None
        again = drawn.array(5)
        assert again.shape == (300, 300)
        assert again.dtype == np.float32
        assert again.mean() == pytest.approx(3, abs=0.1)
        assert again.std() == pytest.approx(2, abs=0.1)
        np.testing.assert_array_equal(again, drawn.array(5))
        assert (again != drawn.array(6)).any()

    def test_others_are_kept(self):
        for array in (np.arange(100_000), np.ones(3, np.float32)):
            argument = step_file.Argument.like(array)
            np.testing.assert_array_equal(argument.array(0), array)
            assert argument.array(0).dtype == array.dtype


@pytest.mark.slow
def test_program(tmp_path, file_of):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.run"]
        + [str(file_of(m)) for m in ("plain", "graph")]
        + ["--seconds=0", "--size=32", "--copied=1000", "--jobs=2"]
        + [f"--precision={p}" for p in ("default", "highest")]
        + [f"--write={tmp_path / 'results'}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert [(s["method"], s["precision"]) for s in results["steps"]] == [
        (method, precision)
        for method in ("plain", "graph")
        for precision in ("default", "highest")
    ]
    graph = results["steps"][-1]
    assert graph["change_error"] < 1e-3
    assert len(graph["ms"]) == 5
    table = (tmp_path / "results" / "table.md").read_text("utf-8")
    assert "| tf_dpsub, graph, highest |" in table
    assert table in done.stdout


@pytest.mark.slow
def test_step_that_cannot_run_has_a_reason(tmp_path, file_of):
    step = step_file.CompiledStep.read(file_of("plain"))
    file = tmp_path / f"{WORKLOAD}_plain.npz"
    dataclasses.replace(step, stablehlo="no program").write(file)
    result = run.Program(file, None).measured(0)
    assert (result["workload"], result["method"]) == (WORKLOAD, "plain")
    assert result["impossible"].startswith("Unable to parse")


def test_operations_are_counted(file_of):
    """At least those of the products: forward, and by weights, of layers."""
    step = step_file.CompiledStep.read(file_of("plain"))
    loaded = run.LoadedStep(step, jax.devices("cpu")[0])
    flop, size = loaded.costs()
    macs = 36 * 64 * 16 + 36 * 16 * 10
    assert flop > 2 * 2 * 12 * macs
    assert size > 4 * 12 * 28 * 28


def test_program_is_of_operations_that_every_device_takes(file_of):
    step = step_file.CompiledStep.read(file_of("plain"))
    assert "mhlo.copy" not in step.stablehlo
    module = str(run._module(step, None))
    assert _jax.mlir.serialize_portable_artifact(module, "1.0.0")


@pytest.mark.parametrize("precision", run._PRECISIONS)
def test_precision_replaces_that_of_all_products(precision, file_of):
    program = step_file.CompiledStep.read(file_of("plain")).stablehlo
    other = {"default": "HIGHEST", "highest": "DEFAULT"}[precision]
    program = program.replace(precision.upper(), other)
    assert other in program
    replaced = run._with_precision(program, precision)
    assert precision.upper() in replaced
    assert other not in replaced
    assert run._with_precision(program, None) == program


def test_peers_have_reasons_where_they_cannot_run(monkeypatch):
    monkeypatch.setattr(run, "_PEERS", {"benchmarks.no_such": ("plain",)})
    (result,) = run.of_peers([WORKLOAD], 0.1)
    assert "no_such" in result["impossible"]
    best = dict.fromkeys(("highest", "default", "bfloat16"), 1.0)
    best = {f"{k} flop/s": v for k, v in best.items()}
    table = run.markdown([], best | {"device": "x", "bytes/s": 1.0}, [result])
    assert result["impossible"] in table
