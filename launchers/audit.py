"""Attacks every mechanism, and reports whether its claims hold.

    tf-dpsub audit --workdir=out/audit
    tf-dpsub audit --mechanisms=GEP,RGP --nomembership --workdir=out/audit

Single steps are audited on given gradients: the noise of each number, its
independence, the divisor, the largest effect of one example on a release, and
the ε that an attacker proves of a step with ε = 1, from the size of releases
and from their low bits. Whole runs are audited by canaries with huge gradients,
which are examples, persons of several rows, or rows with rates of their own;
and by membership inference on scikit-learn's digits. The sampler of epochs in
which each example is drawn once is audited by the steps that it chooses. A
private search is audited by its scores, by its numbers of trials, and by the ε
that an attacker proves of its best score. `--long` takes 10,000
pairs of batches and more runs, as before a release of this package.
`report.html`, `table.md`, `audit.json` and `audit.png` are written to the
workdir; the exit code is 1 if a claim fails. `--dry_run` says how much would be
done.
"""

import concurrent.futures
import dataclasses
import difflib
import multiprocessing
import os
import pathlib

import numpy as np
from absl import flags, logging

from tf_dpsub import files
from tf_dpsub.launchers.audits import mechanism, samplers
from tf_dpsub.launchers.reports import figures, folder_page
from tf_dpsub.launchers.terminal import program, quiet
from tf_dpsub.launchers.terminal.program import DRY_RUN, WORKDIR
from tf_dpsub.launchers.training import run_directory
from tf_dpsub.methods import METHODS

_MECHANISMS = flags.DEFINE_list(
    "mechanisms", None, "Mechanisms to audit; all, unless given."
)
_LONG = flags.DEFINE_bool("long", False, "Take as many cases as for a release.")
_MEMBERSHIP = flags.DEFINE_bool(
    "membership", True, "Train on digits, and infer the training examples."
)
_SHADOW_MODELS = flags.DEFINE_integer(
    "shadow_models",
    0,
    "Shadow models for each attacked model, for the likelihood ratio attack; "
    "use a dozen or more. Each takes as long as the run itself.",
)
flags.register_validator(
    "shadow_models",
    lambda count: count == 0 or count >= 4,
    "Expected four shadow models at least, or none: two see each example.",
)
_PROCESSES = flags.DEFINE_integer(
    "processes",
    None,
    "Audits that run at once, each on a core; as many as there are cores, "
    "unless given.",
    lower_bound=1,
)
_ATTACKS = {
    "loss_threshold": "loss threshold",
    "classifier": "classifier",
    "likelihood_ratio": "likelihood ratio",
}


def announcement(names, sizes, infers, shadow_models):
    """Describes the audit that the flags ask for.

    Args:
        names: sequence of strings, some of `mechanism.NAMES`.
        sizes: `mechanism.Sizes`.
        infers: bool, whether membership inference is included.
        shadow_models: int.
    """
    lines = {
        "mechanisms": ", ".join(names),
        "each": f"{sizes.steps:,} steps whose noise is tested, "
        f"{sizes.cases:,} pairs of neighbouring batches in each of two "
        f"precisions, {sizes.runs:,} runs of one step, {sizes.canaries:,} "
        "canaries in each of four runs",
        "sampler": "once_per_epoch, by the steps that it chooses",
        "claimed": f"ε = {mechanism.STEP_EPSILON:g} at "
        f"δ = {mechanism.DELTA:g}, of a step",
    }
    if infers:
        kinds = len(set(names) & set(METHODS)) + 1
        lines["membership"] = (
            f"{kinds * (1 + shadow_models)} models on digits, the private ones "
            f"with ε = {mechanism.RUN_EPSILON:g}, and one in {kinds} not "
            "private"
        )
    return "\n".join(f"{name:<10} {text}" for name, text in lines.items())


def write(results, plain, folder, command, sampler=None):
    """Writes the results as JSON, as a table and as a figure.

    Args:
        results: list of dicts, as `mechanism.audited` returns them.
        plain: `digits_membership.Attacks` without privacy, or None.
        folder: `pathlib.Path`.
        command: string, the command line that made them.
        sampler: dict, as `samplers.audited` returns it. Defaults to `None`,
            none was audited.
    """
    files.make_folder(folder)
    text = markdown(results, plain, command, sampler)
    files.write_text(folder / "table.md", text)
    files.write_json(
        folder / "audit.json",
        {
            "mechanisms": results,
            "samplers": [] if sampler is None else [sampler],
            "not_private": None if plain is None else dataclasses.asdict(plain),
        },
    )
    folder_page.write_with_figures(folder, {"audit": lambda: draw(results)})
    print(text)


def markdown(results, plain, command, sampler=None):
    """The results as Markdown; failed checks come first."""
    attacks = [
        key
        for key in _ATTACKS
        if plain is not None and getattr(plain, key) is not None
    ]
    lines = folder_page.heading("Audit", command)
    named = [(r["mechanism"], r) for r in results]
    if sampler is not None:
        named.append((sampler["sampler"], sampler))
    failed = [
        f"- **{name}**, {f['check']}: {f['detail']}"
        for name, r in named
        for f in r["findings"]
        if not f["passed"]
    ]
    lines += failed or ["All claims hold."]
    lines += [
        "",
        f"Steps claim ε = {mechanism.STEP_EPSILON:g} at "
        f"δ = {mechanism.DELTA:g}, without sampling; bounds hold with "
        "99.9 %. Variance: that of the noise, divided by the claimed one, of "
        "the number with the largest deviation. Movement: the largest change "
        "of a release by one example, divided by the claimed bound.",
        "",
        "| mechanism | variance | movement | ε of one step ≥ | by low bits ≥ | "
        "ε of one run ≥ |" + "".join(f" {_ATTACKS[key]} |" for key in attacks),
        "|---|---|---|---|---|---|" + "---|" * len(attacks),
    ]
    for result in results:
        value = {f["check"]: f["value"] for f in result["findings"]}
        movement = max(v for c, v in value.items() if "sensitivity" in c)
        # What releases labels or scores alone has neither attack.
        low_bits, one_run = (
            f"{value[check]:.2f}" if check in value else ""
            for check in ("low bits", "one run")
        )
        lines.append(
            f"| {result['mechanism']} | {value['variance']:.3f} | "
            f"{movement:.6f} | {value['epsilon']:.2f} | {low_bits} | "
            f"{one_run} |" + _shares(attacks, result.get("membership"))
        )
    if plain is not None:
        shares = _shares(attacks, dataclasses.asdict(plain))
        lines.append(f"| not private | | | | | |{shares}")
        lines += [
            "",
            "Membership: share of right guesses about digits, half of them "
            "with random labels, with its 95 % interval; then the share of "
            "members found where 1 % of the others are taken for members. "
            f"Private runs have ε = {mechanism.RUN_EPSILON:g}. Chance has 50 % "
            "and 1 %.",
        ]
    if sampler is not None:
        lines += ["", f"The sampler {sampler['sampler']}:", ""]
        lines += [f"- {f['check']}: {f['detail']}" for f in sampler["findings"]]
    return "\n".join(lines) + "\n"


def _shares(attacks, results):
    """Cells of the table, one for each attack."""
    if results is None:
        return " |" * len(attacks)
    cells = ""
    for key in attacks:
        low, high = results[key]["interval"]
        cells += (
            f" {100 * results[key]['success']:.1f} % ({100 * low:.1f} to "
            f"{100 * high:.1f}), "
            f"{100 * results[key]['true_positive_rates'][0.01]:.1f} % |"
        )
    return cells


def draw(results):
    """Bar chart of the proved lower bounds on ε, beside the claimed ε."""
    canvas = figures.new(8, 0.45 * len(results) + 1.6, "Lower bounds on ε")
    axes = canvas.subplots()
    figures.tidy(axes)
    places = np.arange(len(results))[::-1]
    for check, shift, colour in (
        ("epsilon", 0.18, figures.BLUE),
        ("one run", -0.18, figures.ORANGE),
    ):
        bounds = [
            next(
                (f["value"] for f in r["findings"] if f["check"] == check), 0.0
            )
            for r in results
        ]
        label = {"epsilon": "one step, many runs", "one run": "one run"}[check]
        axes.barh(places + shift, bounds, 0.34, color=colour, label=label)
    axes.axvline(
        mechanism.STEP_EPSILON,
        color=figures.RED,
        linestyle="--",
        label="claimed",
    )
    axes.set_yticks(places, [r["mechanism"] for r in results])
    axes.set_xlim(0, 1.2 * mechanism.STEP_EPSILON)
    axes.set_xlabel("ε that is proved")
    axes.grid(axis="y", visible=False)
    canvas.legend(loc="outside right upper", frameon=False)
    return canvas


def main():
    """Runs the audit that the flags ask for; returns the exit code."""
    names = mechanism.NAMES if _MECHANISMS.value is None else _MECHANISMS.value
    unknown = [name for name in names if name not in mechanism.NAMES]
    if not names:
        unknown = ["none"]
    if unknown:
        close = difflib.get_close_matches(unknown[0], mechanism.NAMES, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"Expected --mechanisms among {', '.join(mechanism.NAMES)}, got "
            f"{', '.join(unknown)}.{hint}"
        )
    sizes = mechanism.LONG if _LONG.value else mechanism.SHORT
    shadow_models = _SHADOW_MODELS.value
    if DRY_RUN.value:
        print(announcement(names, sizes, _MEMBERSHIP.value, shadow_models))
        return 0
    if WORKDIR.value is None:
        raise ValueError("Expected --workdir, got none.")
    run_directory.require_own(WORKDIR.value, "audit.json")
    with _processes(_PROCESSES.value) as pool:
        tasks = [
            pool.submit(
                mechanism.audited, name, sizes, _MEMBERSHIP.value, shadow_models
            )
            for name in names
        ]
        plain = None
        if _MEMBERSHIP.value:
            plain = pool.submit(mechanism.attacked, shadow_models=shadow_models)
        sampler = pool.submit(samplers.audited)
        results = []
        for name, task in zip(names, tasks):
            results.append(task.result())
            _report(name, results[-1])
        plain = None if plain is None else plain.result()
        sampler = sampler.result()
        _report(sampler["sampler"], sampler)
    folder = pathlib.Path(WORKDIR.value)
    write(results, plain, folder, program.command("audit"), sampler)
    return 0 if all(r["passed"] for r in [*results, sampler]) else 1


def _report(name, result):
    passed = "all claims hold" if result["passed"] else "FAILED"
    print(f"{name}: {passed}, {result['seconds']:.0f} s", flush=True)


def _processes(count):
    """A pool of processes that load TensorFlow and log errors only."""
    return concurrent.futures.ProcessPoolExecutor(
        count or len(os.sched_getaffinity(0)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_quietly,
    )


def _begin_quietly():
    # oneDNN logs an error on processors without float16.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.get_absl_handler().setFormatter(None)
    logging.get_absl_logger().setLevel("WARNING")
    with quiet.stderr_dropped():
        import tensorflow as tf

        # The tensors are small: more threads would only wait for each other.
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.list_physical_devices()
        tf.get_logger().setLevel("ERROR")


def run():
    """Runs `tf-dpsub audit`."""
    program.run(main)


if __name__ == "__main__":
    run()
