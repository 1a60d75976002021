"""Measurements of batches of rows in a file, of a small one."""

import pytest

from benchmarks import large_data


@pytest.mark.parametrize("kind", ["draw", "read", "map"])
def test_a_small_file(kind, tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(bytes(3000 * 25 * 4))
    result = large_data.point(kind, path, 3000, 25, 100, None, 2)
    # Of an epoch of 30 batches.
    assert result["steps"] == 30
    assert 2400 < result["rows"] < 3600
    if kind == "read":
        # Rows are nearer than a page: what lies between them is read, too.
        assert 100 * result["rows"] <= result["bytes"] < 10**8
    text = large_data.markdown({kind: result})
    assert text.splitlines()[-1].startswith(f"| {kind} | 30 | ")
