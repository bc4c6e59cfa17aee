"""No file of a run contains secrets of the environment, of arguments or of URLs in the config."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

from tests.faults.trainer import arguments
from tests.harness.runner import ROOT, trainer_environment
from tests.harness.secrets import SECRET_VARIABLES, new_secret, with_secret

FUNCTIONAL_VARIABLES = {"MASTER_ADDR", "PYTHONPATH"}
# Settings with free text, and values in which `S` is replaced with a secret.
SETTINGS = {
    "job.description": "https://me:S@host/path?sig=S and password=S, Authorization: Bearer S",
    "validation.dataset_path": "https://me:S@host/val.jsonl?X-Amz-Signature=S",
    "validation.dataset": "me:S@host",
}


def test_no_file_of_a_run_contains_a_secret(tmp_path: Path) -> None:
    folder, secrets = tmp_path / "outputs", {}

    def add_secret(name: str, form: str) -> str:
        secrets[name] = new_secret()
        return with_secret(form, secrets[name])

    variables = {
        n: add_secret(n, form)
        for n, form in SECRET_VARIABLES.items()
        if n not in FUNCTIONAL_VARIABLES
    }
    remote = add_secret("git remote", "https://me:S@git.example.org/r.git")
    variables |= {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "remote.origin.url",
        "GIT_CONFIG_VALUE_0": remote,
    }
    env = trainer_environment({
        **variables, "NGPU": "1", "MAX_RESTARTS": "1"
    })  # fmt: skip
    argv = arguments(
        folder,
        training__steps=2,
        job__show_results="true",
        metrics__enable_tensorboard="true",
        job__save_config_file="saved.json",
        job__print_config="true",
        profiling__enable_profiling="true",
        profiling__profile_freq=2,
        profiling__profiler_warmup=0,
        profiling__profiler_active=1,
        checkpoint__hf_interval=2,
        **{key: add_secret(key, form) for key, form in SETTINGS.items()},
    )
    result = subprocess.run(
        [str(ROOT / "run_train.sh"), *argv], env=env, capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    assert len(secrets) >= 80 and (folder / "report.html").exists()
    files = {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    leaks = [
        (name, str(file))
        for file, text in files.items()
        for name, s in secrets.items()
        if s.encode() in text
    ]
    assert not leaks
    environment = folder / "attempts/1/environment"
    assert b"DB_PASS=<not recorded>" in files[(environment / "variables.txt").relative_to(folder)]
    assert {stat.S_IMODE(path.stat().st_mode) for path in environment.iterdir()} == {0o600}
    names = {file.parts[0] for file in files}
    assert {
        "attempts",
        "checkpoint",
        "torchrun",
        "tb",
        "profile_traces",
        "metrics.jsonl",
        "saved.json",
    } <= names
