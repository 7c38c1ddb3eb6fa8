"""Tracebacks stay until their shard is done."""

from dflash_offline.extract.losses import Failures


def test_tracebacks_go_with_their_shard_whenever_it_was_done(tmp_path):
    failures = Failures(tmp_path / "failures")
    for shard, count in [(3, 1), (3, 2), (23, 1), (41, 1)]:
        failures.keep(shard, count, f"shard {shard}")
    failures.forget(3)
    assert sorted(path.name for path in failures.folder.iterdir()) == ["000023-1.txt", "000041-1.txt"]
    failures.forget_all_but([41, 50])
    assert [path.read_text() for path in failures.folder.iterdir()] == ["shard 41\n"]
    failures.forget_all_but([])
    assert not failures.folder.exists()
    failures.forget_all_but([1])
