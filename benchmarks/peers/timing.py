"""Times steps in a process of their own, and prints what was found as JSON."""

import argparse
import json
import resource
import sys
import time

from benchmarks.peers import workloads

_WARM_UPS, _FEWEST = 3, 5


def main(framework, version, methods, built, steps_per_call=None):
    """Runs one method on one workload, as the command line says.

    Args:
        framework: string.
        version: string, of the framework and of the library of privacy.
        methods: sequence of strings, `"plain"` among them.
        built: function of the name of a workload and of a method, which
            returns a function that makes one training step and waits for its
            end, and the numbers of all and of trained parameters. It raises
            `NotImplementedError`, with the reason, for what the framework
            cannot do.
        steps_per_call: function of a method, which returns how many steps that
            function makes. Defaults to `None`, one of every method.

    Raises:
        ValueError: if the model has another number of parameters than the
            workload says.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=workloads.WORKLOADS)
    parser.add_argument("--method", choices=methods)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    found = {
        "framework": framework,
        "version": version,
        "workload": args.workload,
        "method": args.method,
    }
    try:
        step, parameters, trained = built(args.workload, args.method)
    except NotImplementedError as error:
        found["impossible"] = str(error)
    else:
        _check(args.workload, parameters, trained)
        began = time.perf_counter()
        step()
        found["first_ms"] = 1e3 * (time.perf_counter() - began)
        count = 1 if steps_per_call is None else steps_per_call(args.method)
        found["ms"] = [ms / count for ms in times(step, args.seconds)]
        found["peak_mib"] = peak_mib()
    json.dump(found, sys.stdout)
    print()


def _check(name, parameters, trained):
    expected = workloads.WORKLOADS[name]
    if (parameters, trained) != (expected.parameters, expected.trained):
        raise ValueError(
            f"Expected {expected.parameters:,} parameters, "
            f"{expected.trained:,} of them trained, got {parameters:,} and "
            f"{trained:,}."
        )


def times(step, seconds):
    """Milliseconds of single steps, for so long, and of five at least."""
    for _ in range(_WARM_UPS):
        step()
    found = []
    end = time.perf_counter() + seconds
    while len(found) < _FEWEST or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        found.append(1e3 * (time.perf_counter() - start))
    return found


def peak_mib():
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
