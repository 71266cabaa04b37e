"""The operators' public schemas, from the one file that states them: ``schemas.json`` beside this module."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

NAMESPACE = "afd_ascend"


@dataclass(frozen=True)
class Schema:
    """One operator: ``operator`` with its namespace, ``arguments`` as torch's parser takes them, and whence."""

    operator: str
    arguments: str
    version: str
    source: str
    date: str

    @property
    def name(self) -> str:
        """The operator without its namespace."""
        return self.operator.partition("::")[2]


def load() -> tuple[Schema, ...]:
    """All schemas, in the order of the file. Imports nothing heavy."""
    text = resources.files("ffn_faas.ascend").joinpath("schemas.json").read_text(encoding="utf-8")
    return tuple(Schema(**entry) for entry in json.loads(text))
