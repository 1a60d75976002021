import numpy as np
import pytest

from tf_dpsub.data import npz


def test_arrays_come_in_the_order_asked_for(tmp_path):
    file = tmp_path / "some.npz"
    np.savez(file, a=np.arange(3), b=np.ones((2, 2)), c=np.zeros(1))
    b, a = npz.read_arrays(file, ["b", "a"])
    np.testing.assert_array_equal(a, [0, 1, 2])
    assert b.shape == (2, 2)


def test_missing_array_names_those_there_are(tmp_path):
    file = tmp_path / "some.npz"
    np.savez(file, x=np.arange(3))
    with pytest.raises(ValueError, match="arrays x, y in .*some.npz, got x"):
        npz.read_arrays(file, ["x", "y"])


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match="none.npz, which does not exist"):
        npz.read_arrays(tmp_path / "none.npz", ["x"])


def write_text(file):
    file.write_text("no arrays")


def write_one_array(file):
    with open(file, "wb") as stream:
        np.save(stream, np.arange(3))


def write_part_of_a_file(file):
    np.savez(file, x=np.arange(1000))
    file.write_bytes(file.read_bytes()[:500])


def make_folder(file):
    file.mkdir()


@pytest.mark.parametrize(
    "write", [write_text, write_one_array, write_part_of_a_file, make_folder]
)
def test_other_files_are_refused_in_one_line(tmp_path, write):
    file = tmp_path / "other.npz"
    write(file)
    with pytest.raises(ValueError, match="Expected an .npz file") as error:
        npz.read_arrays(file, ["x"])
    assert "other.npz" in str(error.value)
    assert "\n" not in str(error.value)
