"""Environment and fixtures of all tests. Imports no torch: many unit tests do not need it."""

from __future__ import annotations

import locale
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Variables that a shell, a scheduler, a launcher or a git hook may have set for pytest itself. The
# code under test must not see them.
INHERITED_PREFIXES = (
    "SLURM_", "TORCH_", "TORCHDYNAMO_", "TORCHELASTIC_", "PET_", "PYTORCH_", "NCCL_", "GLOO_", "OMP_",
    "OMPI_", "MASTER_", "GIT_", "WANDB_", "SMTP_", "TRACE_", "CUBLAS_", "CUDA_LAUNCH_",
)  # fmt: skip
INHERITED_NAMES = """
    RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE
    ROLE_WORLD_SIZE NGPU NNODES NODE_RANK RDZV_ID MAX_RESTARTS CONFIG_FILE LOG_RANK LOG_PREFIX
    NUMA_BINDING KNOWN_BAD_GPUS TYPED GRACE_SECONDS REQUEUE MAX_STALLED_STARTS DRY_RUN PATTERN SLOTS
    SIZES JOBS SECONDS_EACH ENGINE EVERY NOTIFY NOTIFY_WEBHOOK MAIL_FROM HOLD_AT CDPATH COLUMNS LINES
    NO_COLOR FORCE_COLOR CLICOLOR_FORCE PYTHON_COLORS PYTHONWARNINGS PYTHONOPTIMIZE PYTHONSAFEPATH
    HTTP_PROXY HTTPS_PROXY ALL_PROXY
""".split()
for _name in tuple(os.environ):
    if _name.startswith(INHERITED_PREFIXES) or _name.upper() in INHERITED_NAMES:
        del os.environ[_name]
_locale = locale.setlocale(locale.LC_ALL)
try:
    locale.setlocale(locale.LC_ALL, "")
except locale.Error:  # not installed on this machine: every bash would print a warning
    for _name in [name for name in os.environ if name == "LANG" or name.startswith("LC_")]:
        del os.environ[_name]
finally:
    locale.setlocale(locale.LC_ALL, _locale)
# Set before torch is imported. One thread per process, because ranks share the cores and sums must
# not depend on their number. No network.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
# Forked ranks cannot use the compile threads of their parent: Inductor would wait for them forever.
os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="1")
os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="disabled")
# Child processes import this checkout from any working directory. The host's name may not resolve.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ["PET_LOCAL_ADDR"] = "localhost"


def pytest_configure() -> None:
    from hypothesis import HealthCheck, settings

    # Ranks share two cores with the tests, so slow examples do not fail.
    slow = [HealthCheck.too_slow]
    settings.register_profile("tests", deadline=None, suppress_health_check=slow, print_blob=True)
    settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))


@pytest.fixture(scope="session", autouse=True)
def _kill_rank_pools() -> Iterator[None]:
    yield
    rank_pool = sys.modules.get("tests.harness.rank_pool")
    if rank_pool is not None:
        rank_pool.kill_all_pools()


@pytest.fixture(autouse=True)
def _restored_root_logger() -> Iterator[None]:
    """Undo `init_logger`, which commands call: other tests run in the same process."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in set(root.handlers).difference(handlers):
        root.removeHandler(handler)


@pytest.fixture(autouse=True)
def _restored_signals() -> Iterator[None]:
    """The launcher ends with signals ignored. Child processes of later tests would inherit it."""
    handlers = {
        signum: signal.getsignal(signum)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture
def repo_root() -> Path:
    """The folder of pyproject.toml."""
    return ROOT
