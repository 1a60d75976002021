import pytest

from tf_dpsub.data import load

COLUMNS = "mr,ref\n"


def write(folder, train, test=COLUMNS + 'name[A],"A, a pub."\n'):
    (folder / "trainset.csv").write_text(train, "utf-8")
    (folder / "testset_w_refs.csv").write_text(test, "utf-8")
    return folder


class TestRelease:
    """The real data, from the folder that `E2E_DATA_DIR` names."""

    def test_descriptions_and_texts(self, e2e_dir):
        data = load("e2e", e2e_dir, private=42_000, public=61)
        assert data.num_classes is None
        assert data.is_text
        assert data.x_train.shape == data.y_train.shape == (42_000,)
        assert data.x_test.shape == data.y_test.shape == (4_693,)
        assert len(set(data.x_test)) == 630
        assert len({*data.x_train, *data.x_public}) == 4_862
        pairs = dict(zip(data.y_test, data.x_test))
        assert pairs["Blue Spice is a coffee shop in city centre."] == (
            "name[Blue Spice], eatType[coffee shop], area[city centre]"
        )

    def test_texts_stay_with_their_descriptions(self, e2e_dir):
        data = load("e2e", e2e_dir)
        named = [
            mr.partition("]")[0].removeprefix("name[") in ref
            for mr, ref in zip(data.x_train, data.y_train)
        ]
        assert sum(named) > 0.9 * len(named)

    def test_the_environment_names_the_folder(self, e2e_dir):
        assert len(load("e2e").y_test) == 4_693


def test_commas_quotes_and_letters_of_all_kinds(tmp_path):
    write(tmp_path, COLUMNS + '"name[Café], near[B]","It\'s ""fine"", £10."\n')
    data = load("e2e", tmp_path)
    assert data.x_train.tolist() == ["name[Café], near[B]"]
    assert data.y_train.tolist() == ['It\'s "fine", £10.']


def test_without_a_folder(monkeypatch):
    monkeypatch.delenv("E2E_DATA_DIR", raising=False)
    with pytest.raises(ValueError, match="Expected data_dir or E2E_DATA_DIR"):
        load("e2e")


def test_a_folder_without_the_files(tmp_path):
    with pytest.raises(ValueError, match="Expected trainset.csv .* which has"):
        load("e2e", tmp_path)


@pytest.mark.parametrize(
    "text", ["", COLUMNS, "MR,ref\na,b\n", COLUMNS + "a,\n", COLUMNS + "a\n"]
)
def test_other_columns_and_missing_texts(tmp_path, text):
    write(tmp_path, text)
    with pytest.raises(ValueError, match="'mr' and 'ref' of all rows of"):
        load("e2e", tmp_path)
