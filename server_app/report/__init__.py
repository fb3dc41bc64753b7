"""The page for people, made from ``summary.json`` and ``metrics.jsonl`` alone."""

from server_app.report.report import write_report

__all__ = ["write_report"]
