"""Dockerfiles: linted, held against manifests and program, their RUN lines executed as far as that goes here.

The pip lines are those of the README's blocks, which CI runs as printed in a clean environment. No image is built.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ffn_faas import config
from ffn_faas.cli import main

from .rendered import OVERLAYS, ROOT, Overlay, all_containers

DOCKER = ROOT / "docker"
FILES = sorted(path.name for path in DOCKER.glob("*.Dockerfile"))
README = (ROOT.parent / "README.md").read_text()
APT = re.compile(
    r"apt-get update && (apt-get install -y --no-install-recommends [a-z0-9+ -]+) && rm -rf /var/lib/apt/lists/\*"
)


def instructions(name: str, keyword: str) -> list[str]:
    """Arguments of an instruction, in order, of the whole file."""
    lines = (DOCKER / name).read_text().replace("\\\n", " ").splitlines()
    return [line.partition(" ")[2].strip() for line in lines if line.split(" ")[0] == keyword]


def runs(kind: str) -> list[tuple[str, str]]:
    return [(name, run) for name in FILES for run in instructions(name, "RUN") if kind in run]


@pytest.mark.parametrize("name", FILES)
def test_hadolint_has_nothing_to_say(name: str) -> None:
    hadolint = shutil.which("hadolint") or str(Path(sys.executable).parent / "hadolint")
    linted = subprocess.run(
        [hadolint, "-c", DOCKER / "hadolint.yaml", DOCKER / name],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize("name", FILES)
def test_every_run_line_is_of_a_kind_that_is_tested_here(name: str) -> None:
    for run in instructions(name, "RUN"):
        assert run.startswith(("apt-get update", "pip ", "useradd ")) or run == "python3 -m venv /opt/venv"


@pytest.mark.parametrize(("name", "run"), runs("pip "))
def test_pip_lines_are_those_that_the_readme_has_and_ci_runs(name: str, run: str) -> None:
    assert run.replace("[gpu]", "[cpu]") in README, f"{name}: {run}"


@pytest.mark.parametrize(("name", "run"), runs("apt-get"))
def test_apt_lines_name_packages_that_exist(name: str, run: str) -> None:
    match = APT.fullmatch(run)
    assert match, run
    if not list(Path("/var/lib/apt/lists").glob("*_Packages*")):
        pytest.skip("no package lists here: apt-get update")
    simulated = subprocess.run(
        [*match[1].split(), "--simulate"], capture_output=True, text=True, check=False, timeout=240
    )
    assert simulated.returncode == 0, simulated.stderr


def test_the_user_is_made_as_the_manifests_run_it(tmp_path: Path) -> None:
    lines = {run for _, run in runs("useradd")}
    assert len(lines) == 1
    (line,) = lines
    if shutil.which("useradd") is None:
        pytest.skip("no useradd here")
    (tmp_path / "etc").mkdir()
    for file in ("passwd", "group", "shadow", "gshadow"):
        (tmp_path / "etc" / file).touch()
    words = shlex.split(line)
    made = subprocess.run(
        [words[0], "--prefix", tmp_path, *words[1:]], capture_output=True, text=True, check=False, timeout=60
    )
    if "Permission denied" in made.stderr or "Cannot" in made.stderr:
        pytest.skip("only root can try useradd")
    assert made.returncode == 0, made.stderr
    name, _, uid, _, _, home, _ = (tmp_path / "etc" / "passwd").read_text().strip().split(":")
    assert (name, home) == ("ffn", "/tmp")
    users = {pod.spec["securityContext"]["runAsUser"] for overlay in OVERLAYS for pod in Overlay(overlay).pods}
    assert users == {int(uid)}
    assert {user for file in FILES for user in instructions(file, "USER")} == {uid}


@pytest.mark.parametrize("name", FILES)
def test_an_init_process_comes_first_and_the_port_is_the_programs(name: str) -> None:
    assert instructions(name, "ENTRYPOINT") == ['["tini", "--"]']
    port = config.DEFAULT_PORT if name.startswith("ffn") else 8000
    assert instructions(name, "EXPOSE") == [str(port)]
    assert "tini" in " ".join(instructions(name, "RUN"))


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("ffn")])
def test_images_of_f_hold_no_vllm_and_ask_live(name: str) -> None:
    assert "vllm" not in " ".join(instructions(name, "RUN"))
    (check,) = instructions(name, "HEALTHCHECK")
    assert '["python", "-m", "ffn_faas", "wait", "--phase=live", "--timeout=3"]' in check
    assert main(["wait", "--phase=live", "--timeout=0.01", "--port=1"]) == 5, "unhealthy where nobody answers"


def test_every_image_of_the_manifests_has_its_dockerfile() -> None:
    images = {
        container["image"].rpartition("/")[2].partition(":")[0]
        for overlay in OVERLAYS
        for _, container in all_containers(Overlay(overlay))
    }
    assert {f"{image}.Dockerfile" for image in images if not image.endswith("-ascend")} == set(FILES)
