"""Write the wheel for SGLang environments and images: wheel.py FOLDER. It needs neither a network nor any package.

    FOLDER/weightcache-VERSION-py3-none-any.whl

The same sources give the same bytes: times are $SOURCE_DATE_EPOCH's, and the archive is not compressed, since what
compresses differs between versions of zlib. What is in it is what setuptools would put there (a test compares).
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EARLIEST = 315532800
"""1980: an archive knows no earlier time."""


def version(package: Path) -> str:
    """The version that the package itself names."""
    found = re.search(r'^__version__ = "(.+)"$', (package / "__init__.py").read_text(), re.MULTILINE)
    if found is None:
        sys.exit(f"{package}/__init__.py has no __version__")
    return found[1]


def modules(package: Path, tool: dict[str, Any]) -> Iterator[Path]:
    """The files of the package: modules of the listed packages, and the listed data."""
    for name in tool["packages"]:
        yield from package.joinpath(*name.split(".")[1:]).glob("*.py")
    for pattern in tool["package-data"]["weightcache"]:
        yield from package.glob(pattern)


def metadata(project: dict[str, Any], number: str) -> str:
    """The core metadata, version 2.1."""
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {project['name']}",
        f"Version: {number}",
        f"Summary: {project['description']}",
        f"License: {project['license']['text']}",
        f"Requires-Python: {project['requires-python']}",
        "Description-Content-Type: text/markdown",
        "License-File: LICENSE",
        *(f"Requires-Dist: {need}" for need in project["dependencies"]),
    ]
    for extra, needs in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f'Requires-Dist: {need}; extra == "{extra}"' for need in needs]
    readme = ROOT / str(project["readme"])
    return "\n".join(lines) + "\n\n" + readme.read_text()


def entry_points(project: dict[str, Any]) -> str:
    """Commands, and what SGLang looks for."""
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    sections = (f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items())
    return "\n".join(sections)


def contents() -> tuple[str, dict[str, bytes]]:
    """The name of the wheel, and its files, of which the last is the record."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, tool = document["project"], document["tool"]["setuptools"]
    package = ROOT / tool["package-dir"]["weightcache"]
    stem = f"weightcache-{version(package)}"
    files = {f"weightcache/{path.relative_to(package)}": path.read_bytes() for path in modules(package, tool)}
    files = dict(sorted(files.items()))
    about = {
        "METADATA": metadata(project, version(package)),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: weightcache\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": entry_points(project),
        "licenses/LICENSE": (ROOT / "LICENSE").read_text(),
    }
    files |= {f"{stem}.dist-info/{name}": text.encode() for name, text in about.items()}
    record = f"{stem}.dist-info/RECORD"
    rows = [f"{name},{_hash(data)},{len(data)}\n" for name, data in files.items()]
    return f"{stem}-py3-none-any.whl", {**files, record: "".join([*rows, f"{record},,\n"]).encode()}


def _hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}"


def main(folder: Path) -> None:
    """Write the wheel."""
    when = time.gmtime(max(int(os.environ.get("SOURCE_DATE_EPOCH", EARLIEST)), EARLIEST))[:6]
    name, files = contents()
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, when)
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
