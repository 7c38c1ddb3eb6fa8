"""Which GPUs a replica gets."""

from __future__ import annotations

import pytest

from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.extract.devices import gpu_groups, worker_environments


def test_gpus_are_grouped_in_order(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_groups([0, 1, 2, 3], 2) == [[0, 1], [2, 3]]
    found = worker_environments([0, 1, 2, 3], None, None, gpus_per_target=2)
    assert found == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    found = worker_environments([0, 1, 3, 2], None, 3, gpus_per_target=2)
    assert [item["CUDA_VISIBLE_DEVICES"] for item in found] == ["4,5", "7,6"]
    assert {item["OMP_NUM_THREADS"] for item in found} == {"3"}


@pytest.mark.parametrize(
    ("gpus", "cpu_workers", "per_target", "message"),
    [
        ([0, 1, 2], None, 2, r"gpus_per_target = 2 does not divide the 3 GPUs 0,1,2"),
        ([0, 1], None, 4, r"gpus_per_target = 4 does not divide the 2 GPUs 0,1"),
        (None, None, 2, r"gpus_per_target = 2 needs GPUs by number.*0-1"),
        (None, 2, 2, r"without run\.cpu_workers"),
    ],
)
def test_groups_that_cannot_be_made_are_refused(monkeypatch, gpus, cpu_workers, per_target, message):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UsageError, match=message):
        worker_environments(gpus, cpu_workers, None, per_target)


def test_cpu_workers_share_the_cores_and_see_no_gpu(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert worker_environments(None, 2, None) == [{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "4"}] * 2
    assert worker_environments(None, None, None) == [{}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(DFlashOfflineError, match="shows only 1 GPUs"):
        worker_environments([1], None, None)
