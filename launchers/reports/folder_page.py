"""The HTML page of a folder of results."""

import csv
import datetime
import html
import importlib.metadata
import io
import json
import math
import platform
import re

import markdown
import numpy as np

import tf_dpsub
from tf_dpsub import files
from tf_dpsub.accounting.statement import round_up
from tf_dpsub.launchers.reports import (
    figures,
    html_statement,
    markup,
    safe_html,
)
from tf_dpsub.launchers.reports.markup import Figure, Section

FILE = "report.html"
_PACKAGES = ("tensorflow", "keras", "numpy", "dp-accounting")
_MAX_RUNS_SHOWN = 20


def versions():
    """Versions of the packages that results depend on, by name."""
    return {
        "python": platform.python_version(),
        "tf_dpsub": tf_dpsub.__version__,
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def write(folder):
    """Writes the page of a folder.

    Args:
        folder: `pathlib.Path`, with `result.json` or with `table.md`.

    Returns:
        `pathlib.Path` of the page.

    Raises:
        ValueError: if there are no results in the folder.
    """
    if (folder / "result.json").exists():
        page = _of_run(folder)
    elif (folder / "table.md").exists():
        page = _of_table(folder)
    else:
        raise ValueError(
            f"Expected a folder with results, got {folder}, which holds "
            "neither result.json nor table.md. Name the workdir of a program "
            "that has ended."
        )
    files.write_text(folder / FILE, page)
    return folder / FILE


def write_with_figures(folder, drawings):
    """Writes the figures of a folder with `table.md`, then its page.

    Args:
        folder: `pathlib.Path`.
        drawings: dict from names of files, without ending, to functions without
            arguments that return a `matplotlib.figure.Figure`, or None where
            there is nothing to draw yet.
    """
    with figures.style():
        for name, draw in drawings.items():
            canvas = draw()
            if canvas is not None:
                figures.write(canvas, folder / f"{name}.png")
    write(folder)


def heading(title, command):
    """Lines that begin a `table.md`, from which its page takes both texts.

    Args:
        title: string.
        command: string, the command line that made the table.
    """
    return [f"# {title}", "", "```sh", command, "```", ""]


# A training run.


def _of_run(folder):
    result = files.read_json(folder / "result.json")
    config = result["config"]
    title = f"{config['dataset']}: {config['optimizer']}, {config['model']}"
    sections = [
        Section("", markup.beside(_figures(folder, title), _numbers(result))),
        *_recorded(folder),
    ]
    statement = folder / "privacy_statement.txt"
    if statement.exists():
        sections.append(html_statement.section(statement.read_text("utf-8")))
    sections += [
        *_others(folder, result),
        Section("Settings", _settings(config)),
        _environment(result["versions"], result["devices"]),
    ]
    return markup.page(
        title,
        f"{result['summary'][0].upper()}{result['summary'][1:]}.",
        sections,
        result["command"],
        _headline(result),
    )


def _headline(result):
    """The main numbers: ε, δ and the accuracy of the model."""
    spent = _epsilon(result["epsilon"])
    private = f"{result['private_examples']:,} private examples"
    persons = result.get("rows_per_person")
    if persons is not None:
        private += f", at most {persons:,} of a person"
    tested = f"{result['test_examples']:,} test examples"
    sampling = result["sampling"].replace("_", " ").capitalize()
    accounting = f"{sampling} sampling, {result['accountant'].upper()}"
    infinite = spent == "∞"
    yield Figure(
        "ε", spent, "not private" if infinite else accounting, infinite
    )
    yield Figure("δ", f"{result['delta']:g}", private)
    if "test_accuracy" in result:
        accuracy = f"{100 * result['test_accuracy']:.1f} %"
        yield Figure("accuracy", accuracy, tested)
        return
    perplexity = float(result["test_perplexity"])
    perplexity_text = f"{perplexity:.4g}" if math.isfinite(perplexity) else "∞"
    yield Figure("perplexity", perplexity_text, tested)
    yield Figure("BLEU", f"{result['test_bleu']:.1f}")


def _numbers(result):
    memory = result["peak_memory_mib"]
    rows = [
        ("noise multiplier σ", f"{result['noise_multiplier']:.4g}"),
        ("clipping norm C", f"{result['l2_norm_clip']}"),
        ("expected batch size", f"{result['batch_size']:,}"),
        ("sampling rate q", f"{result['sampling_rate']:.3g}"),
        ("private examples", f"{result['private_examples']:,}"),
        ("epochs, steps", f"{result['epochs']:,}, {result['steps']:,}"),
        ("parameters", f"{result['parameters']:,}"),
        ("ε by RDP, by PLD", ", ".join(map(_epsilon, _epsilons(result)))),
        ("test loss", f"{float(result['test_loss']):.4g}"),
        ("peak memory", f"{memory['host']:,.0f} MiB"),
    ]
    if result["step_milliseconds"]:
        rows.append(("a step", f"{result['step_milliseconds']:.3g} ms"))
    return markup.pairs(rows)


def _epsilons(result):
    return result["epsilon_rdp"], result["epsilon_pld"]


def _epsilon(value):
    return round_up(value, decimals=2).replace("inf", "∞")


def _recorded(folder):
    """Yields sections with figures of what gradient recorders wrote."""
    file = folder / "test_projection_error.csv"
    if file.exists():
        yield Section(
            "Projection error", _figure_of(_projection_error(file), file)
        )
    for file in sorted(folder.glob("[!.]*_spectrum.npz")):
        yield Section(
            "Spectrum of gradients", _figure_of(_spectrum(file), file)
        )


def _figure_of(canvas, file):
    return markup.figure(figures.svg(canvas, file.stem), canvas.get_suptitle())


def _projection_error(file):
    groups = {}
    for row in csv.DictReader(io.StringIO(file.read_text("utf-8"))):
        point = int(row["epoch"]), float(row["error"])
        groups.setdefault(row["group"], []).append(point)
    canvas = figures.new(7, 3.5, "Energy of public gradients outside")
    axes = canvas.subplots()
    for name, points in groups.items():
        axes.plot(*zip(*points), label=name, linewidth=2)
    axes.set_xlabel("epoch")
    axes.set_ylabel("share outside of the subspace")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, labelcolor=figures.INK)
    figures.tidy(axes)
    return canvas


def _spectrum(file):
    with np.load(file) as arrays:
        epochs, eigenvalues = arrays["epochs"], arrays["eigenvalues"]
    split = "test" if file.stem.startswith("test") else "private"
    canvas = figures.new(7, 3.5, f"Eigenvalues of {split} gradients")
    axes = canvas.subplots()
    for epoch, values in zip(epochs, eigenvalues):
        positive = values[values > 0]
        ranks = np.arange(1, len(positive) + 1)
        axes.loglog(ranks, positive, label=f"epoch {epoch}", linewidth=2)
    axes.set_xlabel("rank")
    axes.set_ylabel("eigenvalue")
    axes.legend(frameon=False, labelcolor=figures.INK)
    figures.tidy(axes)
    return canvas


def _others(folder, result):
    """Yields a section with the other runs in the parent folder."""
    runs = []
    for file in folder.parent.glob("*/result.json"):
        try:
            other = files.read_json(file)
            row = _compared(file, other)
        except (
            OSError,
            ValueError,
            TypeError,
            AttributeError,
            ArithmeticError,
        ):
            # Files of other programs or versions do not fit.
            continue
        runs.append((file.stat().st_mtime, file.parent == folder, row))
    if len(runs) < 2:
        return
    runs.sort(key=lambda run: run[0])
    rows = [
        (f"{row[0]} (this one)" if is_this else row[0], *row[1:])
        for _, is_this, row in runs[-_MAX_RUNS_SHOWN:]
    ]
    columns = ("run", "ended", "data", "method", "result", "ε", "δ")
    text = "<p>Runs in the same folder, the latest last.</p>"
    yield Section("Other runs", text + markup.table(columns, rows))


def _compared(file, result):
    end_time = datetime.datetime.fromtimestamp(file.stat().st_mtime)
    return (
        file.parent.name,
        f"{end_time:%Y-%m-%d %H:%M}",
        result["config"]["dataset"],
        result["config"]["optimizer"],
        result["summary"].partition(" at (")[0],
        _epsilon(result["epsilon"]),
        f"{result['delta']:g}",
    )


def _settings(config):
    return markup.folded(
        "All fields of the config",
        markup.pairs((k, json.dumps(v)) for k, v in config.items()),
    )


# Results of any other program. `table.md` has a heading, as `heading` makes it,
# a paragraph with the result, and the rest.


def _of_table(folder):
    text = (folder / "table.md").read_text("utf-8")
    title = re.search(r"^# (.*)$", text, re.MULTILINE)
    command = re.search(r"^```sh\n(.*?)\n```\n", text, re.DOTALL | re.MULTILINE)
    body = text[command.end() :].strip()
    sentence, _, body = body.partition("\n\n")
    return markup.page(
        title[1],
        sentence.replace("**", "").replace("\n", " "),
        [
            Section("", _figures(folder, title[1])),
            Section("", _from_markdown(body)),
            _environment(versions()),
        ],
        command[1],
    )


def _from_markdown(text):
    # The text is data: HTML in it is not interpreted.
    reader = markdown.Markdown(
        extensions=["tables", "sane_lists", "fenced_code"]
    )
    reader.preprocessors.deregister("html_block")
    reader.inlinePatterns.deregister("html")
    body = safe_html.cleaned(reader.convert(text))
    return body.replace("<table>", '<div class="wide"><table>').replace(
        "</table>", "</table></div>"
    )


# Parts of both kinds of pages.


def _figures(folder, title):
    return "\n".join(
        markup.figure(text, _caption(text, title))
        for text in (
            f.read_text("utf-8") for f in sorted(folder.glob("[!.]*.svg"))
        )
    )


def _caption(svg, title):
    """The title of a figure; empty if it is the title of the page."""
    match = re.search(r"<title>(.*?)</title>", svg, re.DOTALL)
    caption = html.unescape(match[1]) if match else ""
    return "" if caption == title else caption


def _environment(packages, devices=()):
    rows = [*packages.items()]
    if devices:
        rows.append(("devices", ", ".join(devices)))
    return Section("Environment", markup.pairs(rows))
