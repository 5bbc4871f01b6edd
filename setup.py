"""Adds to pyproject.toml: the packages, and the README with absolute links, as a package index needs them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
TOPS = ("core", "store", "serving", "proxy", "trainer", "commands", "features", "client")
RELATIVE_LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?!#|[a-z]+:)")


def with_absolute_links(readme: str) -> str:
    """Point relative links to the files of the released version, and images to their raw content."""
    repository, tag = PROJECT["urls"]["Repository"], f"v{PROJECT['version']}"
    return RELATIVE_LINK.sub(
        lambda link: f"{link[0]}{repository}/{'raw' if link[1] else 'blob'}/{tag}/",
        readme,
    )


setup(
    packages=["lightning_proxy"]
    + [f"lightning_proxy.{name}" for name in find_namespace_packages(include=[f"{top}*" for top in TOPS])],
    script_name="setup.py",  # or else it is packaged as a module: it is in the package's folder
    long_description=with_absolute_links((HERE / "README.md").read_text()),
    long_description_content_type="text/markdown",
)
