"""`jserve doctor`: what is wrong is found, with a next step, and nothing is changed by looking."""

import json
import os
import socket
import subprocess
import sys

import pytest

from jserve.cli import main as cli
from jserve.config import Config
from jserve.doctor import FAIL, OK, WARN, checks, devices, machine, packages
from tests.support.tiny_models import random_gguf

GPU = {"platform": "gpu", "kind": "NVIDIA H200", "count": 1, "sum": 128.0**3, "bytes_limit": 100 * 2**30,
       "bytes_in_use": 2**20}
CPU = {"platform": "cpu", "kind": "cpu", "count": 1, "sum": 128.0**3, "bytes_limit": None, "bytes_in_use": None}
NOTHING = frozenset()


def worst(findings):
    return next((finding for status in (FAIL, WARN) for finding in findings if finding.status == status), None)


def test_this_environment_has_what_jserve_requires():
    assert worst(packages.check_python()) is None
    assert worst(packages.check_packages()) is None


@pytest.mark.parametrize(
    "versions, text, step",
    [
        ({"jax": "0.12.0", "jaxlib": "0.10.2"}, "they are released together", "jaxlib==0.12.0"),
        ({"jax-cuda12-plugin": "0.10.2", "jax-cuda13-plugin": "0.10.2"}, "jax loads either", "pip uninstall"),
        ({"jaxlib": "0.10.2", "jax-cuda13-plugin": "0.9.0"}, "leaves the GPU unused", "jax-cuda13-pjrt==0.10.2"),
        ({"grpcio": "1.85.1", "grpcio-status": "1.90.0"}, "newer than grpcio", "grpcio>=1.90.0"),
    ],
)
def test_known_bad_combinations_are_named_with_what_mends_them(versions, text, step):
    finding = worst(packages.combinations(versions))
    assert text in finding.text and step in finding.next_step


def test_good_combinations_say_nothing():
    assert packages.combinations({"jax": "0.10.2", "jaxlib": "0.10.1", "grpcio": "1.86", "grpcio-status": "1.85"}) == []


@pytest.mark.parametrize(
    "found, size, environment, there, text, step",
    [
        (CPU, 1, {}, {"gpu"}, "a GPU is here, and jax does not use it", "pip install 'jax[cuda13]'"),
        (CPU, 1, {"JAX_PLATFORMS": "cpu"}, {"tpu"}, "a TPU is here", "unset JAX_PLATFORMS (it is cpu)"),
        (GPU, 2, {}, {"gpu"}, "tensor_parallel_size = 2, and there are 1", "--tensor-parallel-size 1"),
        ({**GPU, "sum": 1.0}, 1, {}, {"gpu"}, "a product of ones is 1.0", "diagnosis"),
        ({**GPU, "bytes_in_use": 50 * 2**30}, 1, {}, {"gpu"}, "50.0 GiB of the GPU are in use", "nvidia-smi"),
        (CPU, 1, {"JAX_ENABLE_X64": "1"}, set(), "JAX_ENABLE_X64 is set", "unset JAX_ENABLE_X64"),
        ({**CPU, "platform": "METAL"}, 1, {}, set(), "jax runs on 'METAL'", "unset JAX_PLATFORMS"),
    ],
)
def test_devices_that_would_not_serve(found, size, environment, there, text, step):
    finding = worst(devices.judge(found, size, environment, frozenset(there)))
    assert text in finding.text and step in finding.next_step


def test_a_good_device_is_one_line():
    [finding] = devices.judge(GPU, 1, {}, frozenset({"gpu"}))
    assert finding.status == OK and finding.text == "1 x NVIDIA H200 (gpu), 100.0 GiB each"


def test_jax_that_cannot_start_is_a_finding(monkeypatch):
    monkeypatch.setattr(devices, "_PROBE", "raise RuntimeError('Unknown backend xpu')")
    [finding] = devices.check_devices()
    assert finding.status == FAIL and "Unknown backend xpu" in finding.text and "JAX_PLATFORMS" in finding.next_step


def test_jax_that_hangs_is_a_finding(monkeypatch):
    monkeypatch.setattr(devices, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(devices, "TIME_LIMIT_S", 0.2)
    [finding] = devices.check_devices()
    assert finding.status == FAIL and "another process may hold the device" in finding.next_step


def test_a_cache_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    finding = worst(machine.check_cache(Config().replace("compile", cache_dir=str(tmp_path / "file"))))
    assert finding.status == WARN and "every start compiles again" in finding.text
    missing = tmp_path / "a" / "b"
    assert worst(machine.check_cache(Config().replace("compile", cache_dir=str(missing)))) is None
    assert not missing.parent.exists(), "looking makes nothing"


def test_executables_that_others_can_write_are_a_warning(tmp_path):
    (tmp_path / "executables").mkdir()
    config = Config().replace("compile", cache_dir=str(tmp_path))
    os.chmod(tmp_path / "executables", 0o777)
    assert "can be written by others" in worst(machine.check_cache(config)).text
    os.chmod(tmp_path / "executables", 0o755)
    assert worst(machine.check_cache(config)) is None


def test_a_port_in_use_and_an_open_door_are_found():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = worst(machine.check_server(Config().replace("server", metrics_port=port, port=0)))
    assert finding.status == FAIL and "already in use" in finding.text and "--metrics-port" in finding.text
    finding = worst(machine.check_server(Config().replace("server", host="0.0.0.0", port=0)))
    assert finding.status == FAIL and "neither TLS nor a token file" in finding.text


def test_secrets_and_certificates_are_looked_at(tmp_path):
    auth = tmp_path / "auth.toml"
    auth.write_text(f'[[token]]\nsha256 = "{"0" * 64}"\ntenant = "red"\n')
    auth.chmod(0o644)
    config = Config().replace("server", port=0, auth_file=str(auth))
    assert "can be read by everybody" in worst(machine.check_server(config)).text
    auth.chmod(0o600)
    assert worst(machine.check_server(config)) is None
    assert "TLS needs both" in worst(machine.check_server(Config().replace("server", port=0, tls_cert="x"))).text


def test_too_few_open_files_are_a_warning(monkeypatch):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (256, 512))
    finding = worst(machine.check_files(Config()))
    assert "LimitNOFILE=1280" in finding.next_step and "512 open files allowed at most" in finding.text
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (256, 4096))
    assert worst(machine.check_files(Config())) is None, "the server raises the soft limit itself"


def test_a_model_is_opened_but_not_fetched(tmp_path):
    config = Config().replace("compile", cache_dir=str(tmp_path))
    [finding] = machine.check_model(config)
    assert finding.status == OK and finding.next_step == "jserve fetch smollm2-135m"
    path = random_gguf(tmp_path / "m.gguf")
    [finding] = machine.check_model(config.replace("model", path=str(path)))
    assert finding.status == OK and "GGUF, llama" in finding.text
    path.write_bytes(path.read_bytes()[:3000])
    [finding] = machine.check_model(config.replace("model", path=str(path)))
    assert finding.status == FAIL and "truncated" in finding.text
    [finding] = machine.check_model(config.replace("model", path=str(tmp_path / "nowhere")))
    assert finding.status == FAIL and "no such file" in finding.text


def test_a_check_that_breaks_is_a_finding_and_the_rest_run(monkeypatch):
    monkeypatch.setattr(checks, "check_memory", lambda: 1 / 0)
    monkeypatch.setattr(checks, "check_devices", lambda size: [])
    findings = list(checks.run_checks(Config()))
    assert any("the check itself failed: ZeroDivisionError" in finding.text for finding in findings)
    assert {finding.check for finding in findings} >= {"python", "packages", "memory", "cache", "server"}


def test_the_command_prints_lines_or_json_and_tells_by_its_exit_code(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(checks, "check_devices", lambda size: devices.judge(CPU, size, {}, NOTHING))
    flags = ["--port", "0", "--cache-dir", str(tmp_path)]
    assert cli.main(["doctor", *flags]) == 0
    text = capsys.readouterr().out
    assert "ok    devices   1 x cpu (cpu)" in text and "-> jserve fetch smollm2-135m" in text
    assert cli.main(["doctor", "--json", *flags, "--tp", "4"]) == 1
    found = json.loads(capsys.readouterr().out)
    failed = [finding for finding in found["findings"] if finding["status"] == "fail"]
    assert not found["ok"] and [finding["next_step"] for finding in failed] == ["--tensor-parallel-size 1"]


def test_it_really_starts_jax_elsewhere():
    """The parent must not hold a device that the child tests."""
    code = (
        "import sys; from jserve.doctor.devices import check_devices; print(check_devices()[0]);"
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "(cpu)" in done.stdout
