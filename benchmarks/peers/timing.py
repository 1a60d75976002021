"""Times steps in a process of their own, and prints the results as JSON.

With `--whole_epochs` a program times whole epochs, whose batches its library
draws, and not steps on one batch in memory.

With `--turns` a program says when it is ready, and then makes steps whenever a
line of its input says for how many seconds, so that programs can alternate.
"""

import argparse
import json
import resource
import sys
import time

from benchmarks.peers import workloads

_WARM_UPS, FEWEST = 3, 5


def main(
    framework,
    version,
    methods,
    built,
    built_epoch,
    steps_per_call=None,
):
    """Runs the method and the workload that the command line names.

    Args:
        framework: string.
        version: string, of the framework and of the library of privacy.
        methods: sequence of strings, `"plain"` among them.
        built: function of the name of a workload and of a method, which
            returns a function that makes one training step and waits for its
            end, and the numbers of all and of trained parameters. It raises
            `NotImplementedError`, with the reason, for what the framework
            cannot do.
        built_epoch: as `built`, but for a function that makes the steps of a
            whole epoch, `steps_of_epoch` times the batch, on batches
            that the library draws as users would; it returns their seconds.
        steps_per_call: function of a method, which returns the number of steps
            that its function makes. Defaults to `None`, one for all methods.

    Raises:
        ValueError: if the model has another number of parameters than the
            workload says.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=workloads.WORKLOADS)
    parser.add_argument("--method", choices=methods)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--whole_epochs", action="store_true")
    args = parser.parse_args()
    result = {
        "framework": framework,
        "version": version,
        "workload": args.workload,
        "method": args.method,
    }
    try:
        build = built_epoch if args.whole_epochs else built
        step, parameters, trained = build(args.workload, args.method)
    except NotImplementedError as error:
        _print(result | {"impossible": str(error)})
        return
    _check(args.workload, parameters, trained)
    began = time.perf_counter()
    step()
    result["first_ms"] = 1e3 * (time.perf_counter() - began)
    count, fewest_of_all = 1, FEWEST
    if args.whole_epochs:
        # The first one has traced and compiled.
        count = workloads.WORKLOADS[args.workload].steps_of_epoch
        fewest_of_all = 1
    else:
        warm_up(step)
        if steps_per_call is not None:
            count = steps_per_call(args.method)

    def turn(seconds, fewest):
        return {
            "ms": [ms / count for ms in times(step, seconds, fewest)],
            "peak_mib": peak_mib(),
        }

    if args.turns:
        _print(result)
        for line in sys.stdin:
            _print(turn(float(line), 1))
    else:
        _print(result | turn(args.seconds, fewest_of_all))


def _print(result):
    print(json.dumps(result), flush=True)


def _check(name, parameters, trained):
    expected = workloads.WORKLOADS[name]
    if (parameters, trained) != (expected.parameters, expected.trained):
        raise ValueError(
            f"Expected {expected.parameters:,} parameters, "
            f"{expected.trained:,} of them trained, got {parameters:,} and "
            f"{trained:,}."
        )


def warm_up(step):
    """Makes some steps that are not timed."""
    for _ in range(_WARM_UPS):
        step()


def times(step, seconds, fewest=FEWEST):
    """Milliseconds of single calls, for some seconds, and of a few at least.

    What a function returns is its own measurement, in seconds.
    """
    milliseconds = []
    end = time.perf_counter() + seconds
    while len(milliseconds) < fewest or time.perf_counter() < end:
        start = time.perf_counter()
        own = step()
        seconds_taken = time.perf_counter() - start if own is None else own
        milliseconds.append(1e3 * seconds_taken)
    return milliseconds


def peak_mib():
    """Peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
