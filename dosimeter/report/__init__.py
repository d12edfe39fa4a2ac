"""The report: one HTML page made of records alone, for a reader who does not know the methods."""

from dosimeter.report.page import render, write_report

__all__ = ["render", "write_report"]
