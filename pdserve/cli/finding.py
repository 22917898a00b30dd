"""What `pdserve doctor` finds."""

from typing import NamedTuple


class Finding(NamedTuple):
    grade: str
    """ok, warn or fail"""
    subject: str
    text: str
