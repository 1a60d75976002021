import pytest

from tf_dpsub.launchers.terminal import durations


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.4, "0 s"),
        (59.6, "1 min 0 s"),
        (61, "1 min 1 s"),
        (3599.7, "1 h 0 min"),
        (7384, "2 h 3 min"),
    ],
)
def test_text(seconds, text):
    assert durations.text(seconds) == text
