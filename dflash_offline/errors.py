"""Errors a user can act on, and the exit statuses they map to.

Exit statuses: 0 done, 1 failed, 2 wrong use, 3 interrupted and resumable.
"""

import errno

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DFlashOfflineError(Exception):
    """Something failed; the message says what, why, and which setting or step mends it (exit status 1)."""

    exit_status = 1


class UsageError(DFlashOfflineError):
    """The request itself cannot be right: a bad option, recipe value or path (exit status 2)."""

    exit_status = 2


class Interrupted(DFlashOfflineError):
    """Stopped by a signal with everything finished kept; the same command resumes (exit status 3)."""

    exit_status = 3


def full_disk_advice(error: OSError) -> str:
    """What to do about an error of the system, where it is a full disk; else nothing."""
    if error.errno not in FULL_DISK:
        return ""
    return (
        ": everything committed before it is kept. Free some space or use a larger disk, then run the same command "
        "again; it resumes"
    )
