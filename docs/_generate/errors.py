"""The page of all error messages, read from the program's source: text, class, exit code, remedy, place."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from pathlib import Path

import ffn_faas
from ffn_faas import errors

PACKAGE = Path(ffn_faas.__file__).parent
CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.FfnError) and kind is not errors.FfnError
}
GENERAL = {
    "UsageError": "correct the flag, key or value that the message names",
    "LaunchDisagreement": "start all parts with the values that the message names made equal",
    "ModelRefused": "serve another checkpoint; docs/architectures.md says which",
    "HandshakeRefused": "make the two values that the message names equal",
    "WorldLost": "read the log of the rank that the message names; the launcher restarts the world",
    "SessionLost": "see F's log; start F again, then Attention, or set reattach_timeout_s so that requests wait",
    "Stuck": "read the exit record and the log; start F again",
    "ResourceError": "give what is missing, or make room",
    "NativeMissing": "install the package where a C++ compiler is present",
}
"""What to do where a message itself does not say."""
HEAD = """# Errors and remedies

Every error that the program raises on purpose, from its source; `...` stands for what differs. On the command line it
is one line on stderr, `ffn_faas: error: MESSAGE (REMEDY)`, in F's log a line of level ERROR, and on both sides the same
text where F refuses an Attention. [Operations](operations.md) goes the other way, from a symptom to what to look at.
"""


@dataclass(frozen=True)
class Message:
    """One place that makes an error; ``remedy`` is "" where the message has none of its own."""

    kind: str
    text: str
    remedy: str
    place: str


def messages() -> list[Message]:
    """Every construction of an error class in the package, in the order of classes and files."""
    found: list[Message] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _name(node.func) in CLASSES and node.args:
                remedy = next((keyword.value for keyword in node.keywords if keyword.arg == "remedy"), None)
                place = path.relative_to(PACKAGE.parent).as_posix()
                text = _text(node.args[0])
                found.append(Message(_name(node.func), text, _text(remedy) if remedy else "", place))
    return sorted(found, key=lambda message: list(CLASSES).index(message.kind))


def page() -> str:
    """Markdown."""
    parts, all_messages = [HEAD], messages()
    for name, kind in CLASSES.items():
        own = [message for message in all_messages if message.kind == name]
        summary = (kind.__doc__ or "").strip().splitlines()[0]
        parts.append(
            f"\n## {name}\n\n{summary} Exit code {kind.exit_code}. Remedy, where no other stands: {GENERAL[name]}.\n"
        )
        if own:
            parts.append("| message | remedy | raised in |\n|---|---|---|")
            parts += [f"| {_cell(m.text)} | {_cell(m.remedy)} | `{m.place}` |" for m in own]
    return "\n".join(parts) + "\n"


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _text(node: ast.expr) -> str:
    """The words of a message; what is only known when it happens is ``...``."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return f"{_text(node.body)} / {_text(node.orelse)}"
    return "..."


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ").replace("*", "\\*")
