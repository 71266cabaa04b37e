"""Print the directory of the torch that the environment being installed into holds; nothing when there is none.

Build isolation hides that environment from sys.path, but not from sysconfig and site. torch is not imported.
"""

import site
import sys
import sysconfig
from pathlib import Path

OLDEST = (2, 11)


def candidates() -> list[Path]:
    places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        places.append(site.getusersitepackages())
    return [Path(place) / "torch" for place in places]


def version(directory: Path) -> tuple[int, int] | None:
    """(major, minor) as torch/version.py states it, None when the headers are not there."""
    header = directory / "include" / "torch" / "csrc" / "stable" / "library.h"
    if not header.is_file():
        return None
    for line in (directory / "version.py").read_text().splitlines():
        if line.startswith("__version__"):
            major, minor = line.split("=")[1].strip().strip("'\"").split(".")[:2]
            return int(major), int(minor)
    return None


for candidate in candidates():
    found = version(candidate)
    if found is None:
        continue
    if found >= OLDEST:
        print(candidate)
        break
    print(f"{candidate} is torch {found[0]}.{found[1]}, older than {OLDEST[0]}.{OLDEST[1]}", file=sys.stderr)
