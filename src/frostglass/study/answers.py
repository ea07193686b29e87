"""Answers in SQLite: each is on the disk before the next question is shown, and counts once.

The database is in WAL mode and synced at every commit, so that neither a kill of the server nor a
power cut loses an answer. It holds random ids, hashes of tokens, choices and times; nothing else.
"""

import hashlib
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frostglass.core.errors import DataError, StoreError

SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE participants (
    id TEXT PRIMARY KEY, token TEXT UNIQUE NOT NULL, consented REAL, withdrawn REAL
) STRICT;
CREATE TABLE shown (
    participant TEXT NOT NULL REFERENCES participants (id), place INTEGER NOT NULL,
    time REAL NOT NULL, PRIMARY KEY (participant, place)
) STRICT, WITHOUT ROWID;
CREATE TABLE answers (
    participant TEXT NOT NULL REFERENCES participants (id), place INTEGER NOT NULL,
    choice INTEGER, position INTEGER, time REAL NOT NULL, seconds REAL NOT NULL,
    PRIMARY KEY (participant, place)
) STRICT, WITHOUT ROWID;
"""
WAIT = 10.0  # seconds for another process's transaction


@dataclass(frozen=True)
class State:
    """Where a participant is: `answered` of their trials are done."""

    id: str
    consented: bool
    withdrawn: bool
    answered: int


@dataclass(frozen=True)
class Answer:
    """One answer; `choice` is the item's option, or None when the time was over."""

    participant: str
    place: int
    choice: int | None
    position: int | None
    seconds: float


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what SQLite says about a file, when it is opened or read, into one line."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise DataError(
            f"{path} cannot be used as answers to a study ({error}): give the file answers.sqlite "
            "of this one, in a folder that can be written"
        ) from error


def token_hash(token: str) -> str:
    """Return what the database keeps of a token: a reader of it cannot answer for others."""
    return hashlib.sha256(token.encode()).hexdigest()


def create_answers(path: Path, study: str, tokens: Mapping[str, str]) -> None:
    """Make the empty database of a study with a participant for each token."""
    path.touch(mode=0o600)
    connection = _connect(path)
    try:
        _make_durable(connection)
        connection.executescript(f"BEGIN; {SCHEMA} COMMIT;")
        with connection:
            connection.execute("INSERT INTO about VALUES ('study', ?)", (study,))
            connection.executemany(
                "INSERT INTO participants (id, token) VALUES (?, ?)",
                [(name, token_hash(token)) for name, token in tokens.items()],
            )
    finally:
        connection.close()


class Answers:
    """The answers of a study, for one thread at a time; close it after use.

    With `read_only`, nothing is changed in a file that may belong to something else.
    """

    def __init__(self, path: Path, study: str, *, read_only: bool = False):
        if not path.is_file():
            raise StoreError(f"{path} is missing: give the file {path.name} of this study")
        self.path, self._read_only = path, read_only
        with readable(path):
            self._connection = _connect(path, read_only=read_only)
            row = self._one("SELECT value FROM about WHERE key = 'study'")
        if not row or row[0] != study:
            self._connection.close()
            raise DataError(
                f"{path} has the answers of another study: give the answers.sqlite that was made "
                "with this one"
            )
        if not read_only:
            with readable(path):
                _make_durable(self._connection)

    def close(self) -> None:
        """Write everything into the one file, and close it."""
        if not self._read_only:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()

    def state(self, token: str) -> State | None:
        """Return where the participant with this token is, or None if there is none."""
        row = self._one(
            "SELECT id, consented IS NOT NULL, withdrawn IS NOT NULL, "
            "(SELECT COUNT(*) FROM answers WHERE participant = id) "
            "FROM participants WHERE token = ?",
            token_hash(token),
        )
        return State(row[0], bool(row[1]), bool(row[2]), row[3]) if row else None

    def states(self) -> list[State]:
        """Return where everybody is."""
        rows = self._all(
            "SELECT id, consented IS NOT NULL, withdrawn IS NOT NULL, "
            "(SELECT COUNT(*) FROM answers WHERE participant = id) FROM participants ORDER BY id"
        )
        return [State(row[0], bool(row[1]), bool(row[2]), row[3]) for row in rows]

    def consent(self, participant: str, now: float) -> None:
        """Record that a participant agreed; the first time counts."""
        self._write(
            "UPDATE participants SET consented = ? "
            "WHERE id = ? AND consented IS NULL AND withdrawn IS NULL",
            now,
            participant,
        )

    def shown_at(self, participant: str, place: int) -> float | None:
        """Return when a trial was first shown, or None if it was not."""
        row = self._one(
            "SELECT time FROM shown WHERE participant = ? AND place = ?", participant, place
        )
        return row[0] if row else None

    def show(self, participant: str, place: int, now: float, *, since: float) -> float:
        """Record that a trial is shown; return when its time began.

        A reload does not begin it anew, but an interruption of the server does: what was shown
        before `since`, its start, counts from now.
        """
        before = self.shown_at(participant, place)
        if before is not None and before >= since:
            return before
        self._write("INSERT OR REPLACE INTO shown VALUES (?, ?, ?)", participant, place, now)
        return now

    def record(self, answer: Answer, now: float) -> bool:
        """Keep an answer, if it is the first to its trial; return whether it was.

        Only the next trial of a participant who has agreed can be answered.
        """
        rows = self._write(
            "INSERT OR IGNORE INTO answers SELECT ?1, ?2, ?3, ?4, ?5, ?6 FROM participants "
            "WHERE id = ?1 AND consented IS NOT NULL AND withdrawn IS NULL "
            "AND (SELECT COUNT(*) FROM answers WHERE participant = ?1) = ?2",
            answer.participant,
            answer.place,
            answer.choice,
            answer.position,
            now,
            answer.seconds,
        )
        return rows == 1

    def withdraw(self, participant: str, now: float) -> None:
        """Delete all answers of a participant, who can give no more."""
        with self._connection as connection:
            for table in ("answers", "shown"):
                connection.execute(f"DELETE FROM {table} WHERE participant = ?", (participant,))
            connection.execute(
                "UPDATE participants SET withdrawn = ? WHERE id = ? AND withdrawn IS NULL",
                (now, participant),
            )

    def all(self) -> list[Answer]:
        """Return all answers, by participant and place."""
        columns = "participant, place, choice, position, seconds"
        return [Answer(*row) for row in self._all(f"SELECT {columns} FROM answers ORDER BY 1, 2")]

    def _one(self, query: str, *values: Any) -> Any:
        return self._connection.execute(query, values).fetchone()

    def _all(self, query: str) -> list[Any]:
        return self._connection.execute(query).fetchall()

    def _write(self, query: str, *values: Any) -> int:
        with self._connection as connection:
            return connection.execute(query, values).rowcount


def _connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    mode = "ro" if read_only else "rw"
    address = f"{path.resolve().as_uri()}?mode={mode}"
    # The thread that opens a database need not be the one that uses it, one at a time.
    return sqlite3.connect(address, timeout=WAIT, check_same_thread=False, uri=True)


def _make_durable(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    # FULL, not NORMAL: an answer that was confirmed survives a power cut too.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    # What a participant deletes is overwritten.
    connection.execute("PRAGMA secure_delete = ON")
