"""What contributors are told agrees with the tree."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_files_that_the_contributing_page_names_exist():
    text = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    links = [target.partition("#")[0] for target in re.findall(r"\]\((\.\./[^)]+)\)", text)]
    assert links
    for target in links:
        assert (ROOT / ".github" / target).exists(), target
    for path in re.findall(r"`((?:ffn_faas|docs|tests|\.ci)/[\w./]+?)/?`", text):
        assert (ROOT / path).exists(), path
    for command in (".ci/run", ".ci/lint"):
        assert f"    {command}" in text
        assert (ROOT / command).exists()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_issue_forms_have_what_github_asks_for(form):
    content = yaml.safe_load(form.read_text())
    if form.name == "config.yml":
        assert content == {"blank_issues_enabled": True}
        return
    assert content["name"]
    assert content["description"]
    identifiers = [field["id"] for field in content["body"]]
    assert len(identifiers) == len(set(identifiers))
    for field in content["body"]:
        assert field["type"] in ("textarea", "input", "checkboxes", "dropdown", "markdown")
        assert field["attributes"]["label"]


def test_pre_commit_runs_what_ci_runs_before_its_tests():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = repository["hooks"]
    assert (repository["repo"], hook["language"]) == ("local", "system"), "the tools of the environment, not others"
    assert (hook["pass_filenames"], hook["always_run"]) == (False, True), "the whole tree, as CI"
    assert os.access(ROOT / hook["entry"], os.X_OK)
    assert f'{hook["entry"]} && python -m pytest"' in (ROOT / ".ci" / "run").read_text()


def test_ci_installs_every_extra_that_a_test_needs():
    """Where one is missing tests would be skipped, or fail."""
    block = (ROOT / "README.md").read_text().partition("## Tests")[2].partition("```")[2].partition("```")[0]
    (extras,) = re.findall(r"pip install '\.\[([\w,]+)\]'", block)
    assert {"cpu", "test", "docs", "bench"} <= set(extras.split(","))
