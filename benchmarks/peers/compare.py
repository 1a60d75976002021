"""Private steps of every framework side by side, each in its own environment.

    python -m benchmarks.peers.compare --workdir=out/bench

`make bench` makes the environments and runs this. One process at a time makes
steps of one method on one workload; methods and frameworks take turns, and all
of it is done as often as there are rounds. What was measured is kept in
`runs.jsonl`, so that an interrupted comparison goes on where it was: nothing
else should run on the machine. `table.md`, `results.json` and `bars.png` are
written to the workdir.
"""

import json
import pathlib
import shlex
import statistics
import subprocess
import sys

import numpy as np
from absl import app, flags

from benchmarks.peers.workloads import WORKLOADS
from launchers import figures, whole_file
from launchers.program import WORKDIR

_WORKLOADS = flags.DEFINE_list(
    "workloads", list(WORKLOADS), "Which of them to measure."
)
_FRAMEWORKS = flags.DEFINE_list(
    "frameworks", None, "Which of them to measure; all, unless given."
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "How often each is measured.")
_SECONDS = flags.DEFINE_float("seconds", 10.0, "Of steps, of each process.")
_TIMEOUT = flags.DEFINE_float("timeout", 900.0, "Of a process, in seconds.")

OURS, REFERENCE = "tf_dpsub", "graph"
# The folder of its environment, what it is called, and its methods.
FRAMEWORKS = {
    OURS: (
        None,
        "tf_dpsub",
        (
            "plain", "graph", "vectorized_map", "pdpsgd", "gep", "bgep", "rgp",
            "dp_powersgd",
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
# A bar that is so many times as long as the next one is cut.
_MOST_LONGER = 3
_COLOURS = {
    OURS: figures.BLUE,
    "opacus": figures.RED,
    "jax": figures.GREEN,
    "tensorflow_privacy": figures.ORANGE,
}


def measure(workdir, names, frameworks, rounds, seconds, timeout):
    """Runs what has not run yet.

    Args:
        workdir: `pathlib.Path`, of `runs.jsonl`.
        names: list of strings, workloads.
        frameworks: list of strings.
        rounds: int.
        seconds: float, of steps, of each process.
        timeout: float, seconds of a process.

    Returns:
        List of dicts, all runs so far.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    file = workdir / "runs.jsonl"
    runs = _read(file)
    done = {_key(run) for run in runs}
    tasks = [
        {"round": k, "workload": name, "framework": f, "method": method}
        for k in range(rounds)
        for name in names
        for f in frameworks
        for method in FRAMEWORKS[f][2]
    ]
    left = [task for task in tasks if _key(task) not in done]
    hopeless = {_key(run)[1:] for run in runs if "ms" not in run}
    for count, task in enumerate(left, 1):
        if _key(task)[1:] in hopeless:
            continue
        # The process writes its framework's title.
        run = _run(task, seconds, timeout) | task
        if "ms" not in run:
            hopeless.add(_key(task)[1:])
        runs.append(run)
        with open(file, "a", encoding="utf-8") as opened:
            opened.write(json.dumps(run) + "\n")
        print(f"[{count}/{len(left)}] {_told(run)}", flush=True)
    return runs


def _read(file):
    if not file.exists():
        return []
    lines = file.read_text("utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("}\n")]
    if len(whole) < len(lines):
        # The last one was being written when the process was stopped.
        whole_file.write_text(file, "".join(whole))
    return [json.loads(line) for line in whole]


def _key(run):
    return run["round"], run["workload"], run["framework"], run["method"]


def _run(task, seconds, timeout):
    folder = FRAMEWORKS[task["framework"]][0]
    python = sys.executable if folder is None else f"{folder}/bin/python"
    try:
        done = subprocess.run(
            [
                python,
                "-m",
                f"benchmarks.peers.{task['framework']}_steps",
                f"--workload={task['workload']}",
                f"--method={task['method']}",
                f"--seconds={seconds}",
            ],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"Expected an environment in {folder}/, got none: `make bench` "
            "makes it."
        ) from error
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {timeout:g} s"}
    if done.returncode < 0:
        return {"failed": f"killed by signal {-done.returncode}"}
    if done.returncode:
        return {"failed": (done.stderr.splitlines() or ["nothing said"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def _told(run):
    what = f"{run['workload']}, {run['framework']} {run['method']}: "
    if "ms" not in run:
        return what + run.get("impossible", run.get("failed"))
    return what + (
        f"{statistics.median(run['ms']):.1f} ms, {run['peak_mib']:.0f} MiB"
    )


def summarized(runs):
    """Rows of the table.

    Ratios are medians over rounds of the ratio in one round.

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
    rows = []
    for (name, framework, method), own in by_kind.items():
        row = {"workload": name, "framework": framework, "method": method}
        row["version"] = own[-1].get("version", "")
        measured = [run for run in own if "ms" in run]
        if not measured:
            row["reason"] = own[-1].get("impossible", own[-1].get("failed"))
            rows.append(row)
            continue
        steps = np.concatenate([run["ms"] for run in measured])
        low, middle, high = np.percentile(steps, [25, 50, 75])
        plain = by_kind.get((name, framework, "plain"), [])
        ours = by_kind.get((name, OURS, REFERENCE), [])
        row |= {
            "rounds": len(measured),
            "ms": float(middle),
            "low": float(low),
            "high": float(high),
            "to_plain": _ratio(measured, plain, _median_ms),
            "to_ours": _ratio(measured, ours, _median_ms),
            "peak_mib": max(run["peak_mib"] for run in measured),
            "peak_to_plain": _ratio(
                measured, plain, lambda run: run["peak_mib"]
            ),
        }
        rows.append(row)
    return rows


def _median_ms(run):
    return statistics.median(run["ms"])


def _ratio(runs, others, quantity):
    """Of the same rounds; None if there are none."""
    of_others = {run["round"]: run for run in others if "ms" in run}
    ratios = [
        quantity(run) / quantity(of_others[run["round"]])
        for run in runs
        if run["round"] in of_others
    ]
    return statistics.median(ratios) if ratios else None


def markdown(rows, command):
    """One table for each workload."""
    lines = ["```sh", command, "```", ""]
    versions = {row["version"] for row in rows if row["version"]}
    lines += [f"{'; '.join(sorted(versions))}.", ""]
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


def _two_digits(ratio):
    return "" if ratio is None else f"{ratio:.2f}"


def draw(rows):
    """Times of private steps as bars, and of plain ones as marks."""
    measured = [row for row in rows if "ms" in row]
    names = list(dict.fromkeys(row["workload"] for row in measured))
    private = {
        name: [
            row
            for row in measured
            if row["workload"] == name and row["method"] != "plain"
        ]
        for name in names
    }
    most = max(map(len, private.values()))
    canvas = figures.new(
        8, len(names) * (0.28 * most + 0.8) + 0.6, "Time of a private step"
    )
    for axes, name in zip(
        np.atleast_1d(canvas.subplots(len(names))), names, strict=True
    ):
        figures.tidy(axes)
        figures.subtitle(axes, WORKLOADS[name].title)
        plain = {
            row["framework"]: row["ms"]
            for row in measured
            if row["workload"] == name and row["method"] == "plain"
        }
        edge = _edge([row["ms"] for row in private[name]])
        for place, row in enumerate(private[name]):
            colour = _COLOURS[row["framework"]]
            axes.barh(-place, row["ms"], 0.7, color=colour)
            if row["ms"] > edge:
                text = f"{row['ms']:.0f} "
                axes.text(edge, -place, text, ha="right", va="center")
            if row["framework"] in plain:
                axes.plot(
                    [plain[row["framework"]]] * 2,
                    [-place - 0.35, -place + 0.35],
                    color=figures.INK,
                )
        axes.set_yticks(
            [-k for k in range(len(private[name]))],
            [
                f"{FRAMEWORKS[r['framework']][1]}, {r['method']}"
                for r in private[name]
            ],
        )
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, edge)
    canvas.supxlabel(
        "milliseconds; a line marks the framework's plain step", fontsize=10
    )
    return canvas


def _edge(times):
    """Where the axis ends: one that is far longer than others is cut."""
    *others, longest = sorted(times)
    if others and longest > _MOST_LONGER * others[-1]:
        return 1.5 * others[-1]
    return 1.05 * longest


def write(runs, workdir, command):
    """Writes the table, the rows and the figure; returns the table."""
    rows = summarized(runs)
    text = markdown(rows, command)
    whole_file.write_text(workdir / "table.md", text)
    whole_file.write_text(
        workdir / "results.json", json.dumps(rows, indent=2) + "\n"
    )
    if any("ms" in row for row in rows):
        with figures.style():
            figures.write(draw(rows), workdir / "bars.png")
    return text


def main(_):
    """Runs as the flags say; returns the exit code."""
    frameworks = _FRAMEWORKS.value or list(FRAMEWORKS)
    for known, asked in ((WORKLOADS, _WORKLOADS), (FRAMEWORKS, _FRAMEWORKS)):
        unknown = set(asked.value or ()) - set(known)
        if unknown:
            return (
                f"error: Expected --{asked.name} among {', '.join(known)}, got "
                f"{', '.join(sorted(unknown))}."
            )
    workdir = pathlib.Path(WORKDIR.value or "out/bench")
    runs = measure(
        workdir,
        _WORKLOADS.value,
        frameworks,
        _ROUNDS.value,
        _SECONDS.value,
        _TIMEOUT.value,
    )
    command = shlex.join(
        ["python", "-m", "benchmarks.peers.compare", *sys.argv[1:]]
    )
    print(write(runs, workdir, command))
    return 0


if __name__ == "__main__":
    app.run(main)
