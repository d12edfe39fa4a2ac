"""The report: one HTML page made of records alone, for a reader who does not know the methods."""

from dosimeter.report.page import render, write_report
from dosimeter.report.printing import print_report

__all__ = ["print_report", "render", "write_report"]
