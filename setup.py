"""Give the package README.md with whole addresses, because its relative links lead nowhere on an index. All else is in
pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

PAGES = "https://github.com/pdserve/pdserve/blob/main/"
IMAGES = "https://raw.githubusercontent.com/pdserve/pdserve/main/"


def absolute(link: "re.Match[str]") -> str:
    address = link[1]
    return f"]({IMAGES if address.endswith('.png') else PAGES}{address}"


readme = Path(__file__).with_name("README.md").read_text()
setup(
    long_description=re.sub(r"\]\((?!https?:|#)([^)]+)", absolute, readme),
    long_description_content_type="text/markdown",
)
