"""One HTML file about a study or a run, and its charts as pictures."""

from .writing import PICTURES_FOLDER, REPORT_FILE, write_report

__all__ = ["PICTURES_FOLDER", "REPORT_FILE", "write_report"]
