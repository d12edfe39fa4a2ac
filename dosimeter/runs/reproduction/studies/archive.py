"""What studies found, on disk: one JSON file beside the records of a table, so that a killed run resumes."""

from __future__ import annotations

import json
from pathlib import Path

from dosimeter.artefacts import write_text
from dosimeter.config import describe, digest
from dosimeter.records import finite_only
from dosimeter.runs.reproduction.studies.study import Study

FILE_NAME = "studies.json"
Numbers = dict[str, float | None]


class StudyArchive:
    """The findings of a folder by trial and study; without a folder, nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else folder / FILE_NAME
        known = self._file is not None and self._file.is_file()
        self._findings: dict[str, Numbers] = json.loads(self._file.read_text(encoding="utf-8")) if known and self._file else {}

    def read(self, trial: str, study: Study) -> Numbers | None:
        return self._findings.get(_key(trial, study))

    def write(self, trial: str, study: Study, found: Numbers) -> None:
        self._findings[_key(trial, study)] = finite_only(found)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._file, json.dumps(self._findings, indent=1) + "\n")


def _key(trial: str, study: Study) -> str:
    return digest({"trial": trial, "study": describe(study)})
