"""Results of points of a study, from which an interrupted one goes on."""

import time

from tf_dpsub import files
from tf_dpsub.launchers.terminal import durations, program


def run_each(
    title, folder, points, steps, *, result_of, summary_of, write_results
):
    """Runs the unfinished points one after another, as `run` does.

    Args:
        title, folder, points, steps, write_results: as for `run`.
        result_of: function of a point that gives its result.
        summary_of: function of a result that gives a string, to be printed.

    Returns, Raises: as `run`.
    """

    def results_of(unfinished):
        for point in unfinished:
            began = time.monotonic()
            result = result_of(point)
            yield point, result
            print(
                f"{point.name}: {summary_of(result)} in "
                f"{durations.text(time.monotonic() - began)}",
                flush=True,
            )

    return run(
        title,
        folder,
        points,
        steps,
        results_of=results_of,
        write_results=write_results,
    )


def run(title, folder, points, steps, *, results_of, write_results):
    """Runs the unfinished points of a study, and writes what there is.

    Args:
        title: string, of the study.
        folder: `pathlib.Path`, which is made; its `points.json` holds the
            results.
        points: list of objects with a `name`, those to run.
        steps: int, the length of a run, which is the same for all of them.
        results_of: function of a list of points that gives pairs of a point and
            its result, which JSON can hold, one after another.
        write_results: function of the dict `{"steps": ..., "points": ...}` with
            the results by the names of points, called in the end.

    Returns:
        int, the exit code.

    Raises:
        ValueError: if the folder holds runs of another length.
    """
    files.make_folder(folder)
    file = folder / "points.json"
    saved = {"steps": steps, "points": {}}
    if file.exists():
        saved = files.read_json(file)
    if saved["steps"] != steps:
        raise ValueError(
            f"Expected a folder with runs of {steps} steps, got {folder}, with "
            f"runs of {saved['steps']}. Name another workdir, or give the same "
            "--fraction."
        )
    unfinished = [p for p in points if p.name not in saved["points"]]
    print(
        f"{title}: {len(points)} runs, {len(points) - len(unfinished)} "
        f"finished, {len(unfinished)} to run in {folder}/",
        flush=True,
    )
    try:
        for point, result in results_of(unfinished):
            saved["points"][point.name] = result
            files.write_json(file, saved)
    except KeyboardInterrupt:
        print("\nInterrupted; the same command goes on from here.")
        return program.INTERRUPTED
    finally:
        write_results(saved)
    print(f"{folder}/table.md")
    return 0
