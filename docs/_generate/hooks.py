"""MkDocs hooks: two pages are made from the program while the site is built, so that they cannot be out of date."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER.parents[1]), str(FOLDER)]

import command_line  # noqa: E402
import errors  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402

PAGES = {"command_line.md": command_line.page, "errors.md": errors.page}


def on_files(files: Files, config: Any) -> Files:
    """Add the made pages."""
    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page()))
    return files
