"""What all tests share. Nothing here imports torch: many unit tests do not need it."""

from __future__ import annotations

import locale
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What a shell, a scheduler, a launcher or a git hook has set for pytest itself is not meant for the code under test.
OF_OTHERS = ("SLURM_", "TORCH_", "TORCHDYNAMO_", "TORCHELASTIC_", "PET_", "PYTORCH_", "NCCL_", "GLOO_", "OMP_", "OMPI_",
             "MASTER_", "GIT_", "WANDB_", "SMTP_", "TRACE_", "CUBLAS_", "CUDA_LAUNCH_")  # fmt: skip
OF_OTHERS_TOO = """
    RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE
    NGPU NNODES NODE_RANK RDZV_ID MAX_RESTARTS CONFIG_FILE LOG_RANK LOG_PREFIX NUMA_BINDING KNOWN_BAD_GPUS TYPED
    GRACE_SECONDS REQUEUE MAX_IN_VAIN DRY_RUN PATTERN SLOTS SIZES JOBS SECONDS_EACH ENGINE EVERY NOTIFY NOTIFY_WEBHOOK
    MAIL_FROM HOLD_AT CDPATH COLUMNS LINES NO_COLOR FORCE_COLOR CLICOLOR_FORCE PYTHON_COLORS PYTHONWARNINGS
    PYTHONOPTIMIZE PYTHONSAFEPATH HTTP_PROXY HTTPS_PROXY ALL_PROXY
""".split()
for _name in tuple(os.environ):
    if _name.startswith(OF_OTHERS) or _name.upper() in OF_OTHERS_TOO:
        del os.environ[_name]
_locale = locale.setlocale(locale.LC_ALL)
try:
    locale.setlocale(locale.LC_ALL, "")
except locale.Error:  # it is not on this machine: every bash would warn of that
    for _name in [name for name in os.environ if name == "LANG" or name.startswith("LC_")]:
        del os.environ[_name]
finally:
    locale.setlocale(locale.LC_ALL, _locale)
# Before anything imports torch: one thread a process (ranks share the cores, sums must not depend on them); no network.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="disabled")
# Processes that tests start import this checkout, wherever pytest was called; a host's name may not resolve.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ["PET_LOCAL_ADDR"] = "localhost"


def pytest_configure() -> None:
    from hypothesis import HealthCheck, settings

    # Ranks share two cores with the tests: a slow example is not a failing one.
    slow = [HealthCheck.too_slow]
    settings.register_profile("tests", deadline=None, suppress_health_check=slow, print_blob=True)
    settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needing_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))


@pytest.fixture(scope="session", autouse=True)
def _no_rank_outlives_the_tests() -> Iterator[None]:
    yield
    rank_pool = sys.modules.get("tests.harness.rank_pool")
    if rank_pool is not None:
        rank_pool.kill_all_pools()


@pytest.fixture
def repo_root() -> Path:
    """The folder of pyproject.toml."""
    return ROOT
