"""What people read about a run: one self-contained HTML page, no network needed."""

from dflash_offline.report.page import write_report

__all__ = ["write_report"]
