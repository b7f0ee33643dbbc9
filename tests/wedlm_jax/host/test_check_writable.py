"""Where a result cannot be written is said before the work."""

import tempfile

import pytest

from infer.evaluation_options import check
from infer.prompt import check_trace
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import check_writable


def test_a_file_in_a_folder_that_takes_one_is_fine(tmp_path):
    check_writable(tmp_path / "a.json")
    (tmp_path / "b.json").touch()
    check_writable(tmp_path / "b.json")
    assert [path.name for path in tmp_path.iterdir()] == ["b.json"], "nothing is left"


@pytest.mark.parametrize(
    ("name", "sentence"), [("", "is a folder; expected a file"), ("no/a", "no such folder to")]
)
def test_what_is_no_place_for_a_file_is_refused(tmp_path, name, sentence):
    with pytest.raises(InputError, match=f"^--output {tmp_path / name}: {sentence}"):
        check_writable(tmp_path / name, "--output")


def test_a_folder_that_takes_no_file_is_refused_at_once(tmp_path, monkeypatch):
    """A mount that is read only, or another user's folder: the tests' user may write anywhere."""

    def refused(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    denied = r"a\.json: cannot be written \(Permission denied\)"
    with pytest.raises(InputError, match=rf"--trace .*{denied}"):
        check_trace(str(tmp_path / "a.json"), 1)
    with pytest.raises(InputError, match=rf"--answers .*{denied}"):
        check({"answers": str(tmp_path / "a.json")})
