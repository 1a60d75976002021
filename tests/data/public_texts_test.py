import pytest

from tf_dpsub.data import load_texts


def test_a_text_in_each_line(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("Good.\n\n  naïve \n", "utf-8")
    assert load_texts(path) == ["Good.", "naïve"]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"\n \n", "a text in each line"),
        (b"\xff\xfe", "UTF-8"),
        (None, "UTF-8"),
    ],
    ids=["no text", "no UTF-8", "no file"],
)
def test_no_texts(tmp_path, content, message):
    path = tmp_path / "texts.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_texts(path)
