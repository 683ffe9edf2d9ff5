"""Stored responses in one SQLite file, without an event loop: ``response_store`` has that."""

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import json

from shared.errors import ConfigError, ShoalError

VERSION = 1
BUSY_TIMEOUT_S = 5.0
MAX_CHAIN = 4096  # responses of one conversation

# Gateways before ``shares`` read ``totals``.
_TABLES = """
CREATE TABLE totals (num INTEGER NOT NULL, num_bytes INTEGER NOT NULL);

INSERT INTO totals VALUES (0, 0);

CREATE TABLE responses (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    previous_id TEXT,
    created_s REAL NOT NULL,
    used_s REAL NOT NULL,
    num_bytes INTEGER NOT NULL,
    input BLOB NOT NULL,
    response BLOB NOT NULL
);

CREATE TRIGGER comes AFTER INSERT ON responses BEGIN
    UPDATE totals SET num = num + 1, num_bytes = num_bytes + new.num_bytes;
END;

CREATE TRIGGER goes AFTER DELETE ON responses BEGIN
    UPDATE totals SET num = num - 1, num_bytes = num_bytes - old.num_bytes;
END;

CREATE INDEX by_age ON responses (created_s);

CREATE TABLE items (
    id TEXT NOT NULL,
    owner TEXT NOT NULL,
    response_id TEXT NOT NULL REFERENCES responses ON DELETE CASCADE,
    PRIMARY KEY (id, owner)
);

CREATE INDEX by_response ON items (response_id);
"""
_BACKGROUND = """
CREATE TABLE IF NOT EXISTS background (
    id TEXT PRIMARY KEY REFERENCES responses ON DELETE CASCADE,
    runner TEXT NOT NULL,
    is_wanted INTEGER NOT NULL
)
"""
_SHARES = """
CREATE TABLE IF NOT EXISTS shares (
    owner TEXT PRIMARY KEY, num INTEGER NOT NULL, num_bytes INTEGER NOT NULL
);

CREATE TRIGGER IF NOT EXISTS share_grows AFTER INSERT ON responses BEGIN
    INSERT INTO shares VALUES (new.owner, 1, new.num_bytes)
    ON CONFLICT DO UPDATE SET num = num + 1, num_bytes = num_bytes + excluded.num_bytes;
END;

CREATE TRIGGER IF NOT EXISTS share_shrinks AFTER DELETE ON responses BEGIN
    UPDATE shares SET num = num - 1, num_bytes = num_bytes - old.num_bytes
    WHERE owner = old.owner;
    DELETE FROM shares WHERE owner = old.owner AND num = 0;
END;

DROP INDEX IF EXISTS by_use;

CREATE INDEX IF NOT EXISTS by_owner ON responses (owner, used_s, id, num_bytes);
"""
_COUNT_SHARES = """
INSERT OR REPLACE INTO shares SELECT owner, count(*), sum(num_bytes) FROM responses GROUP BY owner
"""
_OLDEST = """
SELECT id, num_bytes FROM responses
WHERE owner = ? AND id NOT IN (SELECT id FROM background) ORDER BY used_s, id
"""
_WITH_ITEMS = """
SELECT DISTINCT responses.id, length(response)
FROM items JOIN responses ON responses.id = items.response_id
WHERE items.id IN (SELECT value FROM json_each(:ids)) AND items.owner = :owner
AND created_s >= :oldest_s
"""
_CHAIN = """
WITH RECURSIVE chain (id, depth) AS (
    SELECT id, 0 FROM responses WHERE id = :id AND owner = :owner AND created_s >= :oldest_s
    UNION ALL
    SELECT before.id, depth + 1
    FROM chain JOIN responses AS this USING (id) JOIN responses AS before
    ON before.id = this.previous_id AND before.owner = :owner AND before.created_s >= :oldest_s
    WHERE depth < :max_depth
)
SELECT id, previous_id, num_bytes FROM chain JOIN responses USING (id) ORDER BY depth
"""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    max_bytes: int
    max_entries: int
    max_age_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """One response: ``input`` is the JSON array of its own input items, ``response`` its JSON, and
    ``item_ids`` are the ids of both. ``previous_id`` is the response before it, ``runner`` the
    gateway that makes it, in the background, until it has ended."""

    id: str
    owner: str
    previous_id: str | None
    input: bytes
    response: bytes
    item_ids: Sequence[str] = ()
    runner: str | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.input) + len(self.response)


class StoreFull(ShoalError):
    """The store has no more room that the owner of a response may use."""


class ResponseDatabase:
    """Holds responses within ``limits``, which owners share: the owner with the largest share loses
    the response that it used least recently. Responses in the making are not pushed out. Several
    processes may open one file. Its methods raise sqlite3.Error; times are Unix seconds."""

    def __init__(self, path: Path, limits: StoreLimits) -> None:
        """A new file is for our user alone. Raises ConfigError for a file that is not ours, or that
        cannot be written."""
        self._limits = limits
        try:
            path.touch(0o600)  # SQLite's other files get the same permissions
            self._db = sqlite3.connect(
                path, BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._make_tables()
        except (OSError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"response-store: {path}: {reason}") from None

    def _make_tables(self) -> None:
        with self._writing():
            [version] = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _TABLES.split(";\n\n"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {VERSION}")
            elif version != VERSION:
                raise sqlite3.DatabaseError(f"its version is {version}; ours is {VERSION}")
            self._db.execute(_BACKGROUND)
            for statement in _SHARES.split(";\n\n"):
                self._db.execute(statement)
            self._db.execute(_COUNT_SHARES)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk has rolled it back
                self._db.execute("ROLLBACK")
            raise

    def save(self, entry: Entry, now_s: float) -> None:
        """Makes room for the entry. Raises StoreFull."""
        with self._writing():
            self._insert(entry, now_s)

    def finish(self, entry: Entry, now_s: float) -> None:
        """Saves the end of a background response, if it is still there and has not ended. Raises
        StoreFull."""
        with self._writing():
            found = self._db.execute(
                "DELETE FROM responses WHERE id IN (SELECT id FROM background WHERE id = ?)",
                (entry.id,),
            )
            if found.rowcount:
                self._insert(entry, now_s)

    def update(self, response_id: str, response: bytes) -> None:
        """Stores the state so far of a response that is made in the background."""
        with self._writing():
            self._db.execute(
                "UPDATE responses SET response = ?"
                " WHERE id IN (SELECT id FROM background WHERE id = ?)",
                (response, response_id),
            )

    def cancel(self, response_id: str) -> None:
        """Its runner will find that it is no longer wanted."""
        with self._writing():
            self._db.execute("UPDATE background SET is_wanted = 0 WHERE id = ?", (response_id,))

    def runners(self) -> set[str]:
        return {runner for [runner] in self._db.execute("SELECT runner FROM background")}

    def made_by(self, runner: str, now_s: float) -> list[Entry]:
        """The responses of the runner, including the ones it was making when it ended."""
        rows = self._db.execute(
            "SELECT id, owner FROM responses JOIN background USING (id) WHERE runner = ?", (runner,)
        ).fetchall()
        entries = [self.get(response_id, owner, now_s) for response_id, owner in rows]
        return [entry for entry in entries if entry is not None]

    def wanted(self, runner: str) -> set[str]:
        """The ids of responses that the runner shall continue."""
        rows = self._db.execute(
            "SELECT id FROM background WHERE runner = ? AND is_wanted", (runner,)
        )
        return {response_id for [response_id] in rows}

    def get(self, response_id: str, owner: str, now_s: float) -> Entry | None:
        row = self._db.execute(
            "SELECT id, owner, previous_id, input, response, runner"
            " FROM responses LEFT JOIN background USING (id)"
            " WHERE id = ? AND owner = ? AND created_s >= ?",
            (response_id, owner, now_s - self._limits.max_age_s),
        ).fetchone()
        return None if row is None else replace(Entry(*row[:-1]), runner=row[-1])

    def conversation(
        self, response_id: str, owner: str, max_bytes: int, now_s: float
    ) -> list[Entry] | str:
        """The response and all responses before it, the first one first; they count as used. On an
        error returns the id of the missing one, or an empty string if they exceed ``max_bytes``."""
        oldest_s = now_s - self._limits.max_age_s
        asked = {"id": response_id, "owner": owner, "oldest_s": oldest_s, "max_depth": MAX_CHAIN}
        chain = self._db.execute(_CHAIN, asked).fetchall()
        if not chain or chain[-1][1] is not None:
            return str(chain[-1][1]) if chain else response_id
        if sum(num_bytes for *_, num_bytes in chain) > max_bytes:
            return ""
        ids = [entry_id for entry_id, *_ in reversed(chain)]
        with self._writing():
            self._db.executemany(
                "UPDATE responses SET used_s = ? WHERE id = ?", ((now_s, each) for each in ids)
            )
        entries = [self.get(each, owner, now_s) for each in ids]
        return [entry for entry in entries if entry is not None]

    def outputs_with(
        self, item_ids: Collection[str], owner: str, max_bytes: int, now_s: float
    ) -> Iterator[bytes] | int:
        """The JSON of each response with one of the items in its output, or the bytes of all if
        they exceed ``max_bytes``."""
        asked = {
            "ids": json.encode(item_ids).decode(),
            "owner": owner,
            "oldest_s": now_s - self._limits.max_age_s,
        }
        found = self._db.execute(_WITH_ITEMS, asked).fetchall()
        num_bytes: int = sum(num_bytes for _, num_bytes in found)
        if num_bytes > max_bytes:
            return num_bytes
        return self._responses([response_id for response_id, _ in found])

    def _responses(self, ids: Sequence[str]) -> Iterator[bytes]:
        """One after the other, without responses deleted meanwhile."""
        for response_id in ids:
            row = self._db.execute("SELECT response FROM responses WHERE id = ?", (response_id,))
            for [response] in row:
                yield response

    def delete(self, response_id: str, owner: str) -> bool:
        with self._writing():
            done = self._db.execute(
                "DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
            )
        return done.rowcount > 0

    def close(self) -> None:
        self._db.close()

    def _insert(self, entry: Entry, now_s: float) -> None:
        self._make_room(entry, now_s)
        self._db.execute(
            "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(entry.id, entry.owner, entry.previous_id, now_s, now_s, entry.num_bytes),
                *(entry.input, entry.response),
            ),
        )
        self._db.executemany(
            "INSERT OR REPLACE INTO items VALUES (?, ?, ?)",
            ((item_id, entry.owner, entry.id) for item_id in entry.item_ids),
        )
        if entry.runner is not None:
            self._db.execute("INSERT INTO background VALUES (?, ?, 1)", (entry.id, entry.runner))

    def _make_room(self, entry: Entry, now_s: float) -> None:
        limits = self._limits
        oldest_s = now_s - limits.max_age_s
        self._db.execute("DELETE FROM responses WHERE created_s < ?", (oldest_s,))
        shares = Shares(self._db.execute("SELECT owner, num, num_bytes FROM shares"))
        shares.add(entry.owner, 1, entry.num_bytes)
        oldest: dict[str, sqlite3.Cursor] = {}
        leaving = []
        while (is_large := shares.num_bytes > limits.max_bytes) or shares.num > limits.max_entries:
            limit = limits.max_bytes if is_large else limits.max_entries
            for owner in shares.losers(entry.owner, limit, by_bytes=is_large):
                if owner not in oldest:
                    oldest[owner] = self._db.execute(_OLDEST, (owner,))
                if (row := oldest[owner].fetchone()) is not None:
                    break
            else:
                raise StoreFull
            leaving.append(row[:1])
            shares.add(owner, -1, -row[1])
        for cursor in oldest.values():
            cursor.close()
        self._db.executemany("DELETE FROM responses WHERE id = ?", leaving)


class Shares:
    """Shares of the store: how many responses and bytes each owner has."""

    def __init__(self, shares: Iterable[tuple[str, int, int]]) -> None:
        """``shares``: owner, number of responses, their bytes."""
        self._shares = {owner: [num, num_bytes] for owner, num, num_bytes in shares}

    @property
    def num(self) -> int:
        return sum(num for num, _ in self._shares.values())

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._shares.values())

    def add(self, owner: str, num: int, num_bytes: int) -> None:
        """Negative numbers subtract."""
        share = self._shares.setdefault(owner, [0, 0])
        share[0] += num
        share[1] += num_bytes

    def losers(self, owner: str, limit: int, *, by_bytes: bool) -> Iterator[str]:
        """The owners that may lose a response to ``owner``, the largest share first: all with more
        than an equal part of ``limit``, and ``owner`` itself."""
        sizes = {each: share[by_bytes] for each, share in self._shares.items() if share[0]}
        for each in sorted(sizes, key=lambda each: sizes[each], reverse=True):
            if each == owner or sizes[each] * len(sizes) > limit:
                yield each
