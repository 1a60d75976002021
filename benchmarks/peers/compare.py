"""Private steps of every framework side by side, each in its own environment.

    python -m benchmarks.peers.compare --workdir=out/bench

`make bench` makes the environments and runs this. Each method on each workload
is a process, and takes turns of half a second, or of a step, with another one
that makes steps of our DP-SGD: ratios to it are of the same minute, however the
speed of the machine drifts. Each round repeats all of it.
Measurements are kept in `runs.jsonl`, so that an interrupted comparison
goes on where it was: nothing else should run on the machine. `table.md`,
`results.json` and `bars.png` are written to the workdir.

With `--whole_epochs` turns are whole epochs, of batches that each library draws
in its own way, as its users train; without it, steps on a fixed batch.
"""

import contextlib
import itertools
import json
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
from absl import app, flags

from benchmarks.peers import timing
from benchmarks.peers.workloads import WORKLOADS
from tf_dpsub import files
from tf_dpsub.launchers.reports import figures
from tf_dpsub.launchers.terminal.program import WORKDIR

_WORKLOADS = flags.DEFINE_list(
    "workloads", list(WORKLOADS), "Which of them to measure."
)
_FRAMEWORKS = flags.DEFINE_list(
    "frameworks", None, "Which of them to measure; all, unless given."
)
_METHODS = flags.DEFINE_list(
    "compared_methods",
    None,
    "Which of them to measure, as `ghost` of all frameworks or `opacus:ghost` "
    "of one; all, unless given.",
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Number of measurements of each.")
_SECONDS = flags.DEFINE_float("seconds", 10.0, "Of steps, of each process.")
_TIMEOUT = flags.DEFINE_float(
    "timeout", 900.0, "Until a process is ready or has made its turn's steps."
)

_EPOCHS = flags.DEFINE_bool(
    "whole_epochs",
    False,
    "Times whole epochs instead of steps on a fixed batch.",
)

OURS = "tf_dpsub"
# The method that all others are compared with.
REFERENCE = "graph"
# The folder of the environment, the title and the methods of each framework.
FRAMEWORKS = {
    OURS: (
        None,
        "tf_dpsub",
        (
            "plain", "graph", "graph_at_once", "graph_compiled",
            "vectorized_map", "pdpsgd", "gep", "bgep", "rgp", "dp_powersgd",
        ),
    ),
    "opacus": (".venv-opacus", "Opacus", ("plain", "hooks", "ghost")),
    "jax": (".venv-jax", "jax_privacy", ("plain", "vmap")),
    "tensorflow_privacy": (
        ".venv-parity",
        "TensorFlow Privacy",
        ("plain", "dp_model", "ghost"),
    ),
}  # fmt: skip
_SECONDS_A_TURN = 0.5
_SECONDS_TO_STOP = 10
# Longer bars are cut, in multiples of ours.
_LONGEST = 4
_COLOURS = {
    "opacus": figures.RED,
    "jax": figures.GREEN,
    "tensorflow_privacy": figures.ORANGE,
}


def measure(
    workdir,
    names,
    frameworks,
    rounds,
    seconds,
    timeout,
    epochs=False,
    methods=None,
):
    """Runs the tasks that have not run yet.

    Args:
        workdir: `pathlib.Path`, of `runs.jsonl`.
        names: list of strings, workloads.
        frameworks: list of strings.
        rounds: int.
        seconds: float, of steps, of each process.
        timeout: float, seconds until a process answers.
        epochs: bool, whether whole epochs are timed. Defaults to False.
        methods: list of strings, `method` or `framework:method`; by default
            all of each framework.

    Returns:
        List of dicts, all runs so far.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    file = workdir / "runs.jsonl"
    runs = _read(file)
    measured_tasks = {_key(run) for run in runs}
    tasks = [
        {"round": k, "workload": name, "framework": f, "method": method}
        for k in range(rounds)
        for name in names
        for f in frameworks
        for method in FRAMEWORKS[f][2]
        if methods is None or {method, f"{f}:{method}"} & set(methods)
    ]
    hopeless = {_key(run)[1:] for run in runs if "ms" not in run}
    pending = [
        task
        for task in tasks
        if _key(task) not in measured_tasks and _key(task)[1:] not in hopeless
    ]
    count = 0
    for (_, name), group in itertools.groupby(
        pending, lambda task: _key(task)[:2]
    ):
        with _reference(name, timeout, epochs) as reference:
            for task in group:
                count += 1
                if _key(task)[1:] in hopeless:
                    continue
                # The process writes its framework's title.
                run = _run(task, reference, seconds, timeout, epochs) | task
                if "ms" not in run:
                    hopeless.add(_key(task)[1:])
                runs.append(run)
                with open(file, "a", encoding="utf-8") as opened:
                    opened.write(json.dumps(run) + "\n")
                print(f"[{count}/{len(pending)}] {_summary(run)}", flush=True)
    return runs


def _read(file):
    if not file.exists():
        return []
    lines = file.read_text("utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("}\n")]
    if len(whole) < len(lines):
        # The last one was being written when the process was stopped.
        files.write_text(file, "".join(whole))
    return [json.loads(line) for line in whole]


def _key(run):
    return run["round"], run["workload"], run["framework"], run["method"]


@contextlib.contextmanager
def _reference(name, timeout, epochs):
    """The process of our DP-SGD on a workload, ready for turns."""
    with _Process(name, OURS, REFERENCE, timeout, epochs) as process:
        process.answer()
        yield process


def _run(task, reference, seconds, timeout, epochs):
    """Result of a process that takes turns with another one."""
    with _Process(
        task["workload"], task["framework"], task["method"], timeout, epochs
    ) as process:
        try:
            result = process.answer()
            if "impossible" in result:
                return result
            result |= {"ms": [], "our_ms": []}
            end = time.monotonic() + 2 * seconds
            fewest = 1 if epochs else timing.FEWEST
            while len(result["ms"]) < fewest or time.monotonic() < end:
                turn = process.make_steps(_SECONDS_A_TURN)
                result["ms"] += turn["ms"]
                result["peak_mib"] = turn["peak_mib"]
                ours = reference.make_steps(_SECONDS_A_TURN)
                result["our_ms"] += ours["ms"]
                result["our_peak_mib"] = ours["peak_mib"]
        except _FailedError as error:
            if error.process is reference:
                raise
            return {"failed": str(error)}
    return result


class _FailedError(Exception):
    """A process did not answer, for the reason given."""

    def __init__(self, reason, process):
        super().__init__(reason)
        self.process = process


class _Process:
    """A process that makes steps on request."""

    def __init__(self, name, framework, method, timeout, epochs):
        folder = FRAMEWORKS[framework][0]
        python = sys.executable if folder is None else f"{folder}/bin/python"
        self._timeout = timeout
        self._is_late = False
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")
        try:
            self._process = subprocess.Popen(
                [
                    python,
                    "-m",
                    f"benchmarks.peers.{framework}_steps",
                    f"--workload={name}",
                    f"--method={method}",
                    "--turns",
                    *(["--whole_epochs"] if epochs else []),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        except FileNotFoundError as error:
            self._errors.close()
            raise FileNotFoundError(
                f"Expected an environment in {folder}/, got none: `make bench` "
                "makes it."
            ) from error

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def make_steps(self, seconds):
        """Asks for steps, and returns the answer of the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{seconds}\n")
            self._process.stdin.flush()
        return self.answer()

    def answer(self):
        """The next answer of the process.

        Raises:
            _FailedError: if there is none.
        """
        timer = threading.Timer(self._timeout, self._time_out)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):
                    return json.loads(line)
        finally:
            timer.cancel()
        raise _FailedError(self._reason(self._process.wait()), self)

    def _time_out(self):
        self._is_late = True
        self._process.kill()

    def _reason(self, code):
        if self._is_late:
            return f"not done after {self._timeout:g} s"
        if code < 0:
            return f"killed by signal {-code}"
        self._errors.seek(0)
        output = self._errors.read().strip() or "no output"
        return output.splitlines()[-1]


def _summary(run):
    title = f"{run['workload']}, {run['framework']} {run['method']}: "
    if "ms" not in run:
        return title + run.get("impossible", run.get("failed"))
    return title + (
        f"{statistics.median(run['ms']):.1f} ms, {run['peak_mib']:.0f} MiB"
    )


def summarized(runs):
    """Rows of the table.

    Ratios are medians over rounds of the ratio in one round. That to the plain
    step is of two ratios to our DP-SGD, which took turns with both. Where no
    process of our DP-SGD was measured, its row is of these turns.

    Args:
        runs: list of dicts, as `measure` returns them.

    Returns:
        List of dicts: `workload`, `framework`, `method`, `version`; of those
        that ran `ms`, `low` and `high` (quartiles of steps), `to_plain`,
        `to_ours`, `peak_mib` and `peak_to_plain`, of the others `reason`.
    """
    by_kind = {}
    for run in runs:
        by_kind.setdefault(_key(run)[1:], []).append(run)
    for name in {run["workload"] for run in runs}:
        turns = _turns_of_reference(runs, name)
        if turns:
            by_kind.setdefault((name, OURS, REFERENCE), turns)
    rows = []
    for name, framework, method in sorted(by_kind, key=_place):
        kind_runs = by_kind[name, framework, method]
        row = {"workload": name, "framework": framework, "method": method}
        row["version"] = kind_runs[-1].get("version", "")
        measured = [run for run in kind_runs if "ms" in run]
        if not measured:
            row["reason"] = kind_runs[-1].get(
                "impossible", kind_runs[-1].get("failed")
            )
            rows.append(row)
            continue
        steps = np.concatenate([run["ms"] for run in measured])
        low, middle, high = np.percentile(steps, [25, 50, 75])
        plain = by_kind.get((name, framework, "plain"), [])
        row |= {
            "rounds": len(measured),
            "ms": float(middle),
            "low": float(low),
            "high": float(high),
            "to_plain": _ratio(measured, plain, _to_ours),
            "to_ours": statistics.median(map(_to_ours, measured)),
            "peak_mib": max(run["peak_mib"] for run in measured),
            "peak_to_plain": _ratio(
                measured, plain, lambda run: run["peak_mib"]
            ),
        }
        rows.append(row)
    return rows


def _turns_of_reference(runs, name):
    """The turns of our DP-SGD on a workload, as a run for each round."""
    by_round = {}
    for run in runs:
        if run["workload"] == name and "our_peak_mib" in run:
            by_round.setdefault(run["round"], []).append(run)
    return [
        {
            "round": k,
            "ms": (ms := [t for run in others for t in run["our_ms"]]),
            "our_ms": ms,
            "peak_mib": max(run["our_peak_mib"] for run in others),
        }
        for k, others in by_round.items()
    ]


def _place(kind):
    """Sort key of a row, independent of the order of the runs."""
    name, framework, method = kind
    return (
        list(WORKLOADS).index(name),
        list(FRAMEWORKS).index(framework),
        FRAMEWORKS[framework][2].index(method),
    )


def fastest(rows):
    """Row of DP-SGD for each framework: ours, the fastest of the others.

    Args:
        rows: list of dicts, as `summarized` returns them.

    Returns:
        Dict of dicts of rows, by workload and framework.
    """
    best = {}
    for row in rows:
        framework = row["framework"]
        current = best.setdefault(row["workload"], {}).get(framework)
        if "ms" not in row or row["method"] == "plain":
            continue
        if framework == OURS:
            is_better = row["method"] == REFERENCE
        else:
            is_better = current is None or row["to_ours"] < current["to_ours"]
        if is_better:
            best[row["workload"]][framework] = row
    return best


def _to_ours(run):
    return statistics.median(run["ms"]) / statistics.median(run["our_ms"])


def _ratio(runs, others, quantity):
    """Median ratio to others in the same rounds; None without such rounds."""
    of_others = {run["round"]: run for run in others if "ms" in run}
    ratios = [
        quantity(run) / quantity(of_others[run["round"]])
        for run in runs
        if run["round"] in of_others
    ]
    return statistics.median(ratios) if ratios else None


def markdown(rows, command):
    """Tables of DP-SGD by all frameworks, and of each workload."""
    lines = ["```sh", command, "```", ""]
    versions = {row["version"] for row in rows if row["version"]}
    lines += [f"{'; '.join(sorted(versions))}.", "", *_overview(rows), ""]
    for name in dict.fromkeys(row["workload"] for row in rows):
        lines += [
            f"### {WORKLOADS[name].title}",
            "",
            "| framework | step | ms | middle half | × its plain step "
            "| × our DP-SGD | peak MiB | × plain's peak |",
            "|---|---|---|---|---|---|---|---|",
        ]
        reasons = []
        for row in rows:
            if row["workload"] != name:
                continue
            title = FRAMEWORKS[row["framework"]][1]
            if "reason" in row:
                reasons.append(f"{title}, {row['method']}: {row['reason']}")
                continue
            lines.append(
                f"| {title} | {row['method']} | {row['ms']:.1f} | "
                f"{row['low']:.1f} to {row['high']:.1f} | "
                f"{_two_digits(row['to_plain'])} | "
                f"{_two_digits(row['to_ours'])} | {row['peak_mib']:.0f} | "
                f"{_two_digits(row['peak_to_plain'])} |"
            )
        lines += ["", *(f"- {reason}" for reason in reasons), ""]
    return "\n".join(lines)


def _overview(rows):
    others = {f: title for f, (_, title, _) in FRAMEWORKS.items() if f != OURS}
    lines = [
        "| DP-SGD | ms | × its plain step | × plain's peak | "
        + " | ".join(f"{title}, × ours" for title in others.values())
        + " |",
        "|---" * (4 + len(others)) + "|",
    ]
    for name, best in fastest(rows).items():
        if OURS not in best:
            continue
        ours = best[OURS]
        ratios = [
            _two_digits(best[f]["to_ours"]) if f in best else "" for f in others
        ]
        lines.append(
            f"| {WORKLOADS[name].title} | {ours['ms']:.1f} | "
            f"{_two_digits(ours['to_plain'])} | "
            f"{_two_digits(ours['peak_to_plain'])} | {' | '.join(ratios)} |"
        )
    return lines


def _two_digits(ratio):
    return "" if ratio is None else f"{ratio:.2f}"


def draw(rows):
    """Figure of the times of DP-SGD, as multiples of ours."""
    best_rows = fastest(rows)
    bars = {
        name: [f for f in _COLOURS if f in best]
        for name, best in best_rows.items()
        if OURS in best and len(best) > 1
    }
    height = 0.22 * sum(len(bars[name]) + 1 for name in bars) + 1.2
    canvas = figures.new(8, height, "Time of a step of DP-SGD")
    axes = canvas.subplots()
    figures.tidy(axes)
    place, ticks = 0.0, {}
    for name, frameworks in bars.items():
        ticks[WORKLOADS[name].title] = place - (len(frameworks) - 1) / 2
        for framework in frameworks:
            ratio = best_rows[name][framework]["to_ours"]
            axes.barh(place, ratio, 0.8, color=_COLOURS[framework])
            if ratio > _LONGEST:
                axes.text(
                    _LONGEST, place, f"{ratio:.0f} ", ha="right", va="center"
                )
            place -= 1
        place -= 1
    axes.axvline(1, color=figures.INK)
    axes.set_yticks(list(ticks.values()), list(ticks))
    axes.set_xlim(0, _LONGEST)
    axes.grid(axis="y", visible=False)
    for framework, colour in _COLOURS.items():
        axes.barh(0, 0, color=colour, label=FRAMEWORKS[framework][1])
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(_COLOURS))
    axes.set_xlabel("multiples of the time of tf_dpsub, which the line marks")
    return canvas


def write(runs, workdir, command):
    """Writes table, rows and figure, and returns the table."""
    rows = summarized(runs)
    text = markdown(rows, command)
    files.write_text(workdir / "table.md", text)
    files.write_text(
        workdir / "results.json", json.dumps(rows, indent=2) + "\n"
    )
    if any(len(best) > 1 for best in fastest(rows).values()):
        with figures.style():
            figures.write(draw(rows), workdir / "bars.png")
    return text


def main(_):
    """Runs the command line, and returns the exit code."""
    frameworks = _FRAMEWORKS.value or list(FRAMEWORKS)
    methods = [
        name
        for framework, (_, _, own) in FRAMEWORKS.items()
        for method in own
        for name in (method, f"{framework}:{method}")
    ]
    for names, flag in (
        (WORKLOADS, _WORKLOADS),
        (FRAMEWORKS, _FRAMEWORKS),
        (sorted(set(methods)), _METHODS),
    ):
        unknown = set(flag.value or ()) - set(names)
        if unknown:
            return (
                f"error: Expected --{flag.name} among {', '.join(names)}, got "
                f"{', '.join(sorted(unknown))}."
            )
    default = "out/bench_epochs" if _EPOCHS.value else "out/bench"
    workdir = pathlib.Path(WORKDIR.value or default)
    try:
        runs = measure(
            workdir,
            _WORKLOADS.value,
            frameworks,
            _ROUNDS.value,
            _SECONDS.value,
            _TIMEOUT.value,
            _EPOCHS.value,
            _METHODS.value,
        )
    except _FailedError as error:
        return f"error: Expected steps of {OURS} to compare with: {error}"
    command = shlex.join(
        ["python", "-m", "benchmarks.peers.compare", *sys.argv[1:]]
    )
    print(write(runs, workdir, command))
    return 0


if __name__ == "__main__":
    app.run(main)
