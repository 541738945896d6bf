"""Only the journal: what is written together is there together, also for who opens the
file next.
"""

from __future__ import annotations

import contextlib
import sqlite3

import pytest

from orchestrator.errors import ConfigError, JournalError
from orchestrator.protocol.frames import decode, encode
from orchestrator.protocol.messages import PROTOCOL_VERSION, Completed
from orchestrator.storage.journal import HEAD, LARGE_BYTES, Journal

TOKEN = "t" * 32
CLIENT = b"any bytes \xff".decode(errors="surrogateescape")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.sqlite"


def opened(path):
    return Journal(path, run_token=TOKEN, name="m")


def add(journal, job_id):
    journal.add_job(job_id=job_id, kind="OptimStep", client=CLIENT, frames=[b"request"])


def moment(journal, job_id, steps):
    """A job ends, and the trainer holds this many steps."""
    with journal.together():
        journal.end_job(job_id, state="completed", frames=[b"outcome"])
        journal.set_facts({"trainer": {"steps": steps}, f"job:{job_id}": None})


def ends_while_one_comes(journal, job_id, new_id, size=1):
    with journal.together():
        moment(journal, job_id, 1)
        journal.add_job(job_id=new_id, kind="OptimStep", client="c", frames=[bytes(size)])


def said(journal, job_id):
    row = journal.job(job_id)
    return row.outcome, journal.fact("trainer"), journal.fact(f"job:{job_id}")


def set_protocol(path, version):
    sqlite3.connect(path).execute(f"PRAGMA user_version = {version}").connection.close()


def test_a_journal_of_another_protocol_is_read_once_its_jobs_have_ended(path):
    journal = opened(path)
    add(journal, "a")
    moment(journal, "a", 1)
    add(journal, "b")
    journal.close()
    set_protocol(path, PROTOCOL_VERSION + 1)
    with pytest.raises(
        ConfigError, match=f"1 open jobs of protocol version {PROTOCOL_VERSION + 1}"
    ):
        opened(path)
    set_protocol(path, PROTOCOL_VERSION)
    journal = opened(path)
    answer = encode(Completed(request_id="b", result={"version": 1}))
    journal.end_job("b", state="completed", frames=[b"splice/18", *answer[1:]])
    journal.close()
    set_protocol(path, PROTOCOL_VERSION + 1)
    assert decode(opened(path).job("b").outcome).message.result == {"version": 1}
    set_protocol(path, 16)
    with pytest.raises(ConfigError, match="older version of splice"):
        opened(path)


def test_one_moment_is_there_as_a_whole(path):
    journal = opened(path)
    add(journal, "a")
    journal.set_facts({"job:a": {"version": 1}})
    moment(journal, "a", 1)
    other = opened(path)  # nothing waits for this one to be closed
    assert said(journal, "a") == said(other, "a") == ((b"outcome",), {"steps": 1}, {})
    assert other.job("a").client == CLIENT and other.unfinished_jobs() == []


def test_a_moment_that_fails_leaves_nothing(path):
    journal = opened(path)
    add(journal, "a")
    journal.set_facts({"trainer": {"steps": 0}, "job:a": {"version": 1}})
    before = said(journal, "a")
    with pytest.raises(JournalError, match="UNIQUE"):
        ends_while_one_comes(journal, "a", "a")
    assert said(journal, "a") == said(opened(path), "a") == before
    moment(journal, "a", 1)  # the same again is written: nothing believes that it was
    assert said(opened(path), "a") == ((b"outcome",), {"steps": 1}, {})


def test_a_moment_that_the_disk_has_no_room_for_leaves_nothing(path):
    journal = opened(path)
    add(journal, "a")
    before = said(journal, "a")
    journal._db.execute("PRAGMA max_page_count = 16")
    with pytest.raises(JournalError, match=r"journal\.sqlite.* is full\..*--resume"):
        ends_while_one_comes(journal, "a", "b", size=2**20)
    assert said(journal, "a") == said(opened(path), "a") == before
    moment(journal, "a", 1)
    assert said(opened(path), "a") == ((b"outcome",), {"steps": 1}, {})


def test_what_is_known_is_not_written_again(path):
    journal = opened(path)
    journal.set_facts({"trainer": {"steps": 1}})
    watcher = sqlite3.connect(path, isolation_level=None)

    def commits_seen():
        return watcher.execute("PRAGMA data_version").fetchone()[0]

    first = commits_seen()
    journal.set_facts({"trainer": {"steps": 1}, "never set": None})
    assert commits_seen() == first
    journal.set_facts({"trainer": {"steps": 2}})
    assert commits_seen() != first
    journal.close()
    assert opened(path).fact("trainer") == {"steps": 2}
    watcher.close()


BATCH = [bytes([1]) * LARGE_BYTES, b"", bytes([2]) * 7]


def add_large(journal, job_id):
    journal.keep_batch(job_id, BATCH)
    journal.add_job(
        job_id=job_id, kind="TrainMerged", client=CLIENT, frames=[b"v", b"k", b"body", *BATCH]
    )


def batches(path):
    return sorted(path.with_name("batches").iterdir())


def test_a_large_batch_is_a_private_file_until_its_job_ends(path):
    journal = opened(path)
    add_large(journal, "../a")
    (file,) = batches(path)
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert opened(path).request("../a") == (b"v", b"k", b"body", *BATCH)
    assert (
        path.stat().st_size + path.with_name("journal.sqlite-wal").stat().st_size < LARGE_BYTES // 4
    )
    with contextlib.suppress(KeyError), journal.together():
        moment(journal, "../a", 1)
        raise KeyError("the moment did not come about")
    assert journal.request("../a") == (b"v", b"k", b"body", *BATCH), (
        "its batch went with a moment that was taken back"
    )
    moment(journal, "../a", 1)
    assert batches(path) == []


def test_only_batches_of_open_jobs_outlive_a_start(path):
    journal = opened(path)
    add_large(journal, "a")
    journal.keep_batch("never added", BATCH)
    journal.drop_stray_batches()
    assert len(batches(path)) == 1 and journal.request("a")[HEAD:] == tuple(BATCH)
    with batches(path)[0].open("ab") as file:
        file.write(b"x")
    with pytest.raises(JournalError, match="another size"):
        journal.request("a")
    batches(path)[0].unlink()
    with pytest.raises(JournalError, match="batch of job a cannot be read"):
        journal.request("a")


def test_a_run_goes_on_under_its_own_name_only(path):
    opened(path).close()
    with pytest.raises(ConfigError, match="the run is named 'm', not 'typo'"):
        Journal(path, run_token=TOKEN, name="typo")


def test_only_the_newest_outcomes_are_kept(path, monkeypatch):
    """And every job that is open, however old."""
    monkeypatch.setattr("orchestrator.storage.journal.JOBS_KEPT", 3)
    journal = opened(path)
    for number in range(8):
        journal.add_job(
            job_id=str(number), kind="TrainMerged", client="c", frames=[b"v", b"k", b""]
        )
        if number != 2:
            journal.end_job(str(number), state="completed", frames=[b"done"])
    assert [n for n in range(8) if journal.job(str(n)) is not None] == [2, 5, 6, 7]
    assert journal.unfinished_jobs() == ["2"]
