"""Detection of duplicate ids and passages with a database on disk."""

import errno
import sqlite3
from pathlib import Path

_DATABASE_KIB = 64 << 10  # page cache of SQLite


class SeenIds:
    """A temporary database of the document ids and passage digests so far: exact, in constant memory."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)  # left by a killed writer
        self._path = path
        self._database = sqlite3.connect(path, isolation_level=None)
        try:
            for setting in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{_DATABASE_KIB}"):
                self._execute(f"PRAGMA {setting}")
            self._execute("CREATE TABLE documents (id TEXT PRIMARY KEY, place TEXT) WITHOUT ROWID")
            self._execute("CREATE TABLE passages (digest BLOB PRIMARY KEY, copies INT) WITHOUT ROWID")
            self._execute("BEGIN")
        except OSError:
            self.close()
            raise

    def check_document(self, identifier: str, place: str) -> str:
        """Add a document id; return the problem if it is a duplicate, otherwise ""."""
        if self._execute("INSERT OR IGNORE INTO documents VALUES (?, ?)", (identifier, place)).rowcount:
            return ""
        (earlier,) = self._execute("SELECT place FROM documents WHERE id = ?", (identifier,)).fetchone()
        return f"the id {identifier!r} was used at {earlier}; give each document a unique id"

    def passage_id(self, digest: str) -> str:
        statement = "INSERT INTO passages VALUES (?, 1) ON CONFLICT DO UPDATE SET copies = copies + 1 RETURNING copies"
        ((copies,),) = self._execute(statement, (bytes.fromhex(digest),)).fetchall()
        return digest if copies == 1 else f"{digest}-{copies}"

    def _execute(self, statement: str, values: tuple[str | bytes, ...] = ()) -> sqlite3.Cursor:
        try:
            return self._database.execute(statement, values)
        except sqlite3.OperationalError as error:  # SQL is fixed: only the disk can fail
            code = errno.ENOSPC if error.sqlite_errorname == "SQLITE_FULL" else errno.EIO
            raise OSError(code, str(error), str(self._path)) from None

    def close(self) -> None:
        self._database.close()
        self._path.unlink(missing_ok=True)
