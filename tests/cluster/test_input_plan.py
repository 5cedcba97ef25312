"""Local inputs of a submission: uploaded, recorded in inputs.yaml, and found again without the files."""

from pathlib import Path

import pytest
import small_project

from realmops.inputs.lock_file import read_lock


def test_uploaded_inputs_are_found_without_the_files(tmp_path: Path) -> None:
    params = small_project.write_project(tmp_path)
    key = "with the key"
    refused = small_project.cli("submit", "--params", params, "--dry-run")
    assert refused.exit_code == 2
    assert "--store s3://BUCKET/PREFIX" in refused.stderr
    assert "dvc push" in refused.stderr
    store = f"file://{tmp_path}/store"
    assert small_project.cli("upload", "--params", params, "--store", store).exit_code == 0
    names = {f"questions.{split}.jsonl" for split in ("train", "dev", "test")}
    assert read_lock(tmp_path).keys() == names | {"documents.jsonl"}
    first = small_project.cli("submit", "--params", params, "--dry-run").stdout
    for file in tmp_path.glob("*.jsonl"):
        file.unlink()
    second = small_project.cli("submit", "--params", params, "--dry-run").stdout
    lines = [next(line for line in text.splitlines() if key in line) for text in (first, second)]
    assert lines[0] == lines[1]
    assert f"{store}/files/md5/" in second


@pytest.mark.parametrize("text", ["[]", "a: 1", "a: {md5: x, address: y}"])
def test_a_malformed_lock_is_refused_with_its_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "inputs.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"inputs\.yaml.*realmops upload"):
        read_lock(tmp_path)
