"""What a check found."""

from dataclasses import dataclass
from enum import StrEnum


class Grade(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    grade: Grade
    subject: str
    text: str
    advice: str = ""
    """what to do, where something is to be done"""


def ok(subject: str, text: str) -> Finding:
    return Finding(Grade.OK, subject, text)


def warn(subject: str, text: str, advice: str) -> Finding:
    return Finding(Grade.WARN, subject, text, advice)


def fail(subject: str, text: str, advice: str) -> Finding:
    return Finding(Grade.FAIL, subject, text, advice)
