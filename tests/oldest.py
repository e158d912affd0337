"""Print the oldest supported version of every dependency, as constraints for pip.

`make test-oldest` installs these: `numpy>=1.26` becomes `numpy==1.26.*`, `safetensors>=0.4.3`
becomes `safetensors==0.4.3`. The arguments name the extras to include.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)(\[[a-z,]+\])?>=(?P<version>[0-9.]+)")


def constraints(document: dict, extras: list[str]) -> list[str]:
    """Return one constraint per dependency; the highest bound counts if there are several.

    >>> project = {"dependencies": ["numpy>=1.26"], "optional-dependencies": {"a": ["x>=0.4.3"]}}
    >>> constraints({"project": project}, ["a"])
    ['numpy==1.26.*', 'x==0.4.3']
    """
    project = document["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    oldest: dict[str, tuple[int, ...]] = {}
    for text in wanted:
        if found := REQUIREMENT.match(text):
            version = tuple(int(part) for part in found["version"].split("."))
            oldest[found["name"]] = max(version, oldest.get(found["name"], ()))
    return [
        f"{name}=={'.'.join(map(str, version))}{'.*' if len(version) < 3 else ''}"
        for name, version in oldest.items()
    ]


if __name__ == "__main__":
    print("\n".join(constraints(tomllib.loads(Path("pyproject.toml").read_text()), sys.argv[1:])))
