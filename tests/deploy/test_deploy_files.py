"""Deployment files: the script by shellcheck, in a dry run and twice; unit, settings and manifest by their readers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jserve.cli import config_file

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "deploy"
SETUP = FOLDER / "setup_tpu_vm.sh"


def found(command: str) -> str | None:
    """A program on PATH, or beside this python."""
    return shutil.which(command) or shutil.which(command, path=str(Path(sys.executable).parent))


@pytest.fixture
def stubs(tmp_path):
    """A PATH on which nothing changes the machine: every call is a line of `calls`."""
    folder, calls = tmp_path / "stubs", tmp_path / "calls"
    folder.mkdir()
    calls.touch()
    scripts = {
        "systemctl": 'case "$1" in is-enabled|is-active) [ -e "$STATE" ];; enable) touch "$STATE";; esac',
        "useradd": 'touch "$STATE.user"',
        "id": 'case "$1" in -u) echo 0;; *) [ -e "$STATE.user" ];; esac',
        "apt-get": "true",
        "python3.13": "exit 1",
        "python3.12": "exit 1",
        # A venv whose pip "installs" jserve.
        "python3.11": 'if [ "$1" = -m ]; then mkdir -p "$3/bin"; for name in python pip jserve; do '
                      'printf "#!/bin/sh\\necho pip \\"\\$@\\" >>\\"\\$CALLS\\"\\n" >"$3/bin/$name"; '
                      'chmod +x "$3/bin/$name"; done; fi',
    }
    for name, body in scripts.items():
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >>"$CALLS"\n{body}\n')
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls),
                   "STATE": str(tmp_path / "state")}

    def run(*arguments: str) -> tuple[str, list[str]]:
        """The script's output, and the calls that could have changed something."""
        before = len(calls.read_text().splitlines())
        done = subprocess.run(["bash", SETUP, *arguments], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        harmless = ("id ", "systemctl is-", "python3.11 -c", "python3.12", "python3.13")
        return done.stdout, [call for call in calls.read_text().splitlines()[before:] if not call.startswith(harmless)]

    return run


def test_shellcheck_finds_nothing():
    shellcheck = found("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, "--enable=quote-safe-variables", SETUP], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_dry_run_says_everything_and_does_nothing(stubs, tmp_path):
    root = tmp_path / "root"
    said, calls = stubs("--root", str(root), "--dry-run")
    assert calls == [] and not root.exists()
    for line in ("+ useradd --system", "+ python3.11 -m venv", "+ install -D -m 0644", "+ systemctl daemon-reload",
                 "+ systemctl enable --now jserve"):
        assert line in said
    assert f"pip install --quiet --upgrade {FOLDER.parents[1]}\\[tpu\\]" in said


def test_a_second_run_changes_nothing(stubs, tmp_path):
    root = tmp_path / "root"
    _, first = stubs("--root", str(root), "--source", "jserve==0.1.0")
    assert [call.split()[0] for call in first] == ["useradd", "python3.11", "pip", "systemctl", "systemctl"]
    assert "jserve==0.1.0[tpu]" in first[2]
    assert (root / "etc/systemd/system/jserve.service").read_text() == (FOLDER / "jserve.service").read_text()
    said, second = stubs("--root", str(root), "--source", "jserve==0.1.0")
    assert second == [] and "service: running" in said


def test_a_change_is_installed_and_the_service_restarted_and_own_settings_are_kept(stubs, tmp_path):
    root, settings = tmp_path / "root", tmp_path / "own.toml"
    stubs("--root", str(root), "--source", "jserve==0.1.0")
    target = root / "etc/jserve/jserve.toml"
    target.write_text("# mine")
    _, calls = stubs("--root", str(root), "--source", "jserve==0.2.0")
    assert [call.split()[0] for call in calls] == ["pip", "systemctl"] and calls[1] == "systemctl restart jserve"
    assert target.read_text() == "# mine"
    settings.write_text("[server]\nport = 1\n")
    _, calls = stubs("--root", str(root), "--source", "jserve==0.2.0", "--config", str(settings))
    assert calls == ["systemctl restart jserve"] and target.read_text() == settings.read_text()


@pytest.mark.parametrize("arguments, message", [
    (["--sauce", "x"], "unknown argument --sauce"), (["--source"], "--source needs a value"),
    (["--extra", "npu"], "must be tpu, cuda13, cuda12 or none"), (["--config", "/nowhere"], "cannot read it")])
def test_bad_usage_is_exit_code_2(arguments, message):
    done = subprocess.run(["bash", SETUP, *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr


def test_the_unit_passes_systemd_analyze(tmp_path):
    analyze = found("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "jserve.service"
    unit.write_text((FOLDER / "jserve.service").read_text().replace("/opt/jserve/venv/bin/jserve", "/bin/true"))
    done = subprocess.run([analyze, "verify", "--man=no", unit], capture_output=True, text=True)
    own = [line for line in done.stderr.splitlines() if "jserve" in line]
    assert own == []


def test_settings_are_known_and_stops_outlast_drains():
    config = config_file.load(FOLDER / "jserve.toml")
    unit = dict(line.split("=", 1) for line in (FOLDER / "jserve.service").read_text().splitlines() if "=" in line)
    assert int(unit["TimeoutStopSec"]) > config.server.drain_timeout_s
    assert unit["ExecStart"].endswith("--config /etc/jserve/jserve.toml")
    assert config.compile.cache_dir == "/var/cache/" + unit["CacheDirectory"]


def manifests() -> dict[str, dict]:
    yaml = pytest.importorskip("yaml")
    return {document["kind"]: document for document in yaml.safe_load_all((FOLDER / "gke-tpu.yaml").read_text())}


def test_the_manifest_is_valid_by_the_kubernetes_schema():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in manifests().values():
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_manifest_fits_the_server():
    tomllib = pytest.importorskip("tomllib")
    documents = manifests()
    config = config_file.from_tables(tomllib.loads(documents["ConfigMap"]["data"]["jserve.toml"]))
    pod = documents["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": config.server.port, "http": config.server.http_port, "metrics": config.server.metrics_port}
    [pause] = [int(container["lifecycle"]["preStop"]["exec"]["command"][1])]
    assert pod["terminationGracePeriodSeconds"] > pause + config.server.drain_timeout_s
    assert config.server.auth_file and not config.server.insecure
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert config.compile.cache_dir in mounts and str(Path(config.server.auth_file).parent) in mounts
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["resources"]["requests"] == container["resources"]["limits"]


def test_the_image_installs_extras_that_exist():
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (FOLDER / "Dockerfile").read_text()
    assert "tpu|cuda12|cuda13)" in text and {"tpu", "cuda12", "cuda13"} <= extras.keys()
