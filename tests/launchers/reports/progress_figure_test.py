"""The figure of a run."""

import math

import pytest

from tf_dpsub.launchers.reports import progress_figure


@pytest.mark.parametrize("perplexities", [(math.inf, 3.0), (math.inf,) * 2])
def test_an_infinite_perplexity_leaves_a_gap(tmp_path, perplexities):
    rows = [
        {
            "epoch": epoch,
            "epsilon": 1.0,
            "perplexity": math.nan,
            "val_perplexity": perplexity,
        }
        for epoch, perplexity in enumerate(perplexities, 1)
    ]
    progress_figure.save_progress(
        tmp_path / "progress.png",
        rows,
        title="a",
        subtitle="b",
        metric="perplexity",
        is_share=False,
        delta=1e-5,
    )
    assert (tmp_path / "progress.svg").exists()
