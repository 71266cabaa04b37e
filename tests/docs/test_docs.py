"""The documentation agrees with the program, and its links lead somewhere."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def load(name):
    """A module of docs/_generate."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / "_generate" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


ERRORS, COMMAND_LINE = load("errors"), load("command_line")
MADE = {"errors.md": ERRORS.page(), "command_line.md": COMMAND_LINE.page()}


def anchors(text):
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def text_of(name):
    return MADE.get(name) or (DOCS / name).read_text()


def nav_pages(entries):
    for entry in entries:
        for value in entry.values():
            yield from nav_pages(value) if isinstance(value, list) else [value]


def test_every_page_is_in_the_navigation_and_nothing_else_is():
    config = yaml.safe_load((ROOT / ".mkdocs.yml").read_text())
    assert sorted(nav_pages(config["nav"])) == sorted({page.name for page in PAGES} | MADE.keys())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_and_files_that_pages_name_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        assert name in ("", page.name) or name in MADE or (DOCS / name).exists(), target
        assert not anchor or anchor in anchors(text_of(name or page.name)), target
    for path in re.findall(r"`((?:ffn_faas|native|tests|docs|deploy)/[\w./-]*\w/?)`", text):
        assert (ROOT / path).exists() or list(ROOT.glob(f"{path}*")), path


@pytest.mark.parametrize("command", ["serve", "check", "top", "profile", "wait", "stop"])
def test_the_settings_page_names_every_flag(command):
    settings = (DOCS / "settings.md").read_text()
    missing = [
        option
        for action in COMMAND_LINE.flags(command)
        for option in action.option_strings
        if option.startswith("--") and f"`{option}`" not in settings
    ]
    assert missing == []


def test_defaults_in_the_settings_page_are_those_of_serve():
    section = (DOCS / "settings.md").read_text().split("\n## ")[1]
    rows = dict(re.findall(r"^\| `(--[\w-]+)`[^|]*\| ([^|]+) \|", section, re.MULTILINE))
    told = {
        action.option_strings[0]: str(action.default).removesuffix(".0")
        for action in COMMAND_LINE.flags("serve")
        if isinstance(action.default, int | float | str) and action.default not in (False, "", "{}")
    }
    shared = told.keys() & rows.keys()
    differing = {flag: (rows[flag], told[flag]) for flag in shared if rows[flag].split()[0] != told[flag]}
    assert len(shared) > 10
    assert differing == {}


def test_every_error_of_the_program_has_a_remedy_and_stands_on_the_page():
    messages = ERRORS.messages()
    assert len(messages) > 100
    assert ERRORS.GENERAL.keys() == ERRORS.CLASSES.keys()
    told = next(message for message in messages if message.text.startswith("cannot listen on"))
    assert told.text == "cannot listen on ...:...: ..."
    assert "another process has the port" in told.remedy
    for message in messages:
        assert message.text in ("...", "") or message.place in MADE["errors.md"]


def test_every_exit_code_stands_in_the_operations_page():
    table = (DOCS / "operations.md").read_text()
    for kind in ERRORS.CLASSES.values():
        assert f"\n| {kind.exit_code} | " in table


def test_every_help_text_teaches():
    for command in COMMAND_LINE.COMMANDS:
        made = COMMAND_LINE.parser(command)
        assert "examples:" in made.epilog, command
        assert "python -m ffn_faas" in made.epilog, command
        for action in COMMAND_LINE.flags(command):
            assert action.help, (command, action)
            assert not isinstance(action, argparse._VersionAction)


def test_the_site_builds_strictly(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ".mkdocs.yml", "-d", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert built.returncode == 0, built.stderr
    assert "--receiver-shutdown-timeout" in (tmp_path / "site" / "command_line" / "index.html").read_text()
