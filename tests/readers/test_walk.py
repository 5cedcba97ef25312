"""The walk over a folder of documents: what it follows, what it leaves out, and in which order."""

from pathlib import Path

from realmops.readers.walk import walk_files


def names(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in walk_files(folder)]


def put(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.name)


def test_files_come_before_subfolders_each_in_the_order_of_names(tmp_path: Path) -> None:
    put(*(tmp_path / name for name in ("b/2", "b/10", "b/a/1", "c", "a/z", "a.txt", ".hidden", ".git/x", "b/.x")))
    assert names(tmp_path) == ["a.txt", "c", "a/z", "b/10", "b/2", "b/a/1"]


def test_a_linked_folder_is_read_once_and_loops_end(tmp_path: Path) -> None:
    top, outside = tmp_path / "in", tmp_path / "out"
    put(top / "own" / "1", outside / "deep" / "2", outside / "3")
    (top / "a").symlink_to(outside)
    (top / "b").symlink_to(outside)  # its files are those of a
    (top / "c").symlink_to(top / "own")  # read at its own place
    (top / "own" / "up").symlink_to("..")
    (outside / "deep" / "round").symlink_to(outside)
    (outside / "deep" / "top").symlink_to(top)
    (top / "self").symlink_to("self")
    assert names(top) == ["self", "a/3", "a/deep/2", "own/1"]
    (tmp_path / "link").symlink_to(top)
    assert names(tmp_path / "link") == names(top)


def test_a_link_to_a_hidden_folder_is_followed(tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap: the names are links into a hidden folder, which is replaced at an update."""
    put(tmp_path / "..2024" / "sub" / "1.txt", tmp_path / "..2024" / "2.txt")
    (tmp_path / "..data").symlink_to("..2024")
    (tmp_path / "sub").symlink_to("..data/sub")
    (tmp_path / "2.txt").symlink_to("..data/2.txt")
    assert names(tmp_path) == ["2.txt", "sub/1.txt"]
