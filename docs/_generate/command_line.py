"""The page of all commands with their flags, from the parsers themselves."""

from __future__ import annotations

import argparse
from importlib import import_module

from ffn_faas.afd_block import AfdBlock, ConnectorExtraConfig
from ffn_faas.cli import COMMANDS

HEAD = """# Command line

Made from the program's own parsers. [Settings](settings.md) says more about each flag, the environment and the `afd`
block.
"""


class _Caught(Exception):
    """Carries the parser that a command has just made."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser(command: str) -> argparse.ArgumentParser:
    """The parser of a command, caught when the command is about to use it."""

    def caught(self: argparse.ArgumentParser, *_: object) -> None:
        raise _Caught(self)

    original = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = caught  # type: ignore[assignment, method-assign]
    try:
        import_module(f"ffn_faas.cli.{command}").run([])
    except _Caught as made:
        return made.parser
    finally:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
    raise RuntimeError(f"{command} has no parser")


def flags(command: str) -> list[argparse.Action]:
    """What a user may give, in the order of --help."""
    actions = parser(command)._actions  # noqa: SLF001
    return [action for action in actions if action.help != argparse.SUPPRESS and action.dest != "help"]


def page() -> str:
    """Markdown."""
    parts = [HEAD]
    for command, purpose in COMMANDS.items():
        made = parser(command)
        parts.append(f"## `{made.prog}`\n\n{purpose[0].upper()}{purpose[1:]}.\n")
        parts.append("| flag | default | meaning |\n|---|---|---|")
        parts += [_row(action) for action in flags(command)]
        parts.append(f"\n```text\n{made.epilog}\n```\n" if made.epilog else "")
    parts.append("## The `afd` block\n")
    parts.append(_fields("afd", AfdBlock))
    parts.append(_fields("afd.connector_extra_config", ConnectorExtraConfig))
    return "\n".join(parts)


def _row(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar}`"
    shown = "" if action.default in (None, False, "", "{}") else f"`{action.default}`"
    meaning = (action.help or "") % {"default": action.default} if action.help else ""
    if action.choices:
        meaning += f" ({', '.join(map(str, action.choices))})"
    return f"| {names} | {shown} | {_cell(meaning)} |"


def _fields(name: str, model: type[AfdBlock | ConnectorExtraConfig]) -> str:
    rows = [f"\nKeys of `{name}`:\n", "| key | type | default |", "|---|---|---|"]
    for key, field in model.model_fields.items():
        default = "" if field.is_required() or field.default is None else f"`{field.default!r}`"
        kind = getattr(field.annotation, "__name__", str(field.annotation))
        rows.append(
            f"| `{field.alias or key}` | {_cell(kind)} | {'' if key == 'connector_extra_config' else default} |"
        )
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
