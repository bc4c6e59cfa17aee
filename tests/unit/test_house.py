"""Check the import rules of the packages: which ones import each other, and when."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.check_requirements import requirements

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torchtitan_like"
CORE = sorted(PACKAGE.rglob("*.py"))
ALL = CORE + sorted(
    path for top in ("scripts", "tests", "benchmarks") for path in (ROOT / top).rglob("*.py")
)

# Packages that import slowly, or may be missing, are imported in the functions that use them.
NEVER_AT_TOP_LEVEL = {
    "bokeh", "datasets", "huggingface_hub", "matplotlib", "pandas", "pyarrow", "tensorboard", "torchao",
    "torchft", "transformers", "triton", "wandb",
}  # fmt: skip
# Imported but required by another package, and required but not imported (see pyproject.toml).
INDIRECT = {
    "annotated_types": "pydantic",
    "pydantic_core": "pydantic",
    "huggingface_hub": "datasets",
}
NOT_IMPORTED = {"datasets", "safetensors", "tensorboard", "transformers", "accelerate"}
# Importing torch takes seconds. Checking a config on a login node must not import it.
WITHOUT_TORCH = [
    "torchtitan_like.launcher.launch",
    "torchtitan_like.launcher.outcome",
    "torchtitan_like.config",
    "torchtitan_like.extensions",
    "torchtitan_like.plan.layouts",
    "torchtitan_like.check",
    "torchtitan_like.data.text.documents",
    "torchtitan_like.data.text.tokenizer",
]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_file_names_are_unique() -> None:
    """A name says which file is meant. Each model has the same four files."""
    names = [path.name for path in CORE if path.parent.parent.name != "models"]
    names = [name for name in names if name not in ("__init__.py", "__main__.py")]
    assert len(names) == len(set(names)), sorted({n for n in names if names.count(n) > 1})
    models = PACKAGE.glob("models/*/flavors.py")
    for folder in (path.parent for path in models):
        files = {path.name for path in folder.glob("*.py")}
        assert files == {"__init__.py", "model.py", "flavors.py", "sharding.py", "hf.py"}


def test_packages_import_only_what_they_may() -> None:
    """pyproject.toml has the contracts."""
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_checking_a_config_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'datasets', 'pandas', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


# Run the trainer until it builds its optimizer.
UP_TO_THE_OPTIMIZER = """
import sys
from torchtitan_like import run, train

def count_modules(*_, **__):
    print(len(sys.modules), sorted({"sympy", "torch._dynamo", "torch.distributed.tensor"} & sys.modules.keys()))
    sys.exit()

train.build_optimization = count_modules
run.main(sys.argv[1:])
"""


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"])
def test_one_rank_imports_few_modules(tmp_path: Path, dtype: str) -> None:
    """Nothing imports DTensor or torch's compiler before the optimizer, which needs it."""
    options = {
        "job.dump_folder": tmp_path,
        "data.cache_folder": tmp_path,
        "training.dataset_path": ROOT / "torchtitan_like/data/corpus/shakespeare_validation.jsonl",
        "training.seq_len": 64,
        "training.mixed_precision_param": dtype,
        "activation_checkpoint.mode": "none",
    }
    command = [sys.executable, "-c", UP_TO_THE_OPTIMIZER]
    command += [part for key, value in options.items() for part in (f"--{key}", str(value))]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    num_modules, _, forbidden = result.stdout.splitlines()[-1].partition(" ")
    assert int(num_modules) <= 1_600 and forbidden == "[]"


def test_no_import_circle_spans_two_packages() -> None:
    """Imports in functions and under TYPE_CHECKING count, which lint-imports does not report."""
    assert [
        circle for circle in circles(import_graph()) if len(set(map(package_of, circle))) > 1
    ] == []


def test_an_import_circle_is_detected() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_config_never_imports_torch() -> None:
    offenders = [
        f"{name_of(path)}:{node.lineno}"
        for path in CORE
        if path.is_relative_to(PACKAGE / "config")
        for node in ast.walk(ast.parse(path.read_text()))
        if any(top_package(name) == "torch" for name in imported(node))
    ]
    assert not offenders


def test_models_never_import_torch_distributed() -> None:
    offenders = [
        f"{name_of(path)}:{node.lineno}: {name}"
        for path in CORE
        if path.is_relative_to(PACKAGE / "models")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in imported(node)
        if name.startswith("torch.distributed")
    ]
    assert not offenders


def test_slow_packages_are_imported_in_functions() -> None:
    offenders = [
        f"{name_of(path)}:{node.lineno}: {name}"
        for path in CORE
        for node in at_import_time(ast.parse(path.read_text()).body)
        for name in imported(node)
        if top_package(name) in NEVER_AT_TOP_LEVEL
    ]
    assert not offenders


def test_the_package_imports_exactly_its_requirements() -> None:
    """Compare imports of other packages with the lists in pyproject.toml."""
    actual = {
        top_package(name)
        for path in CORE
        for node in ast.walk(ast.parse(path.read_text()))
        for name in imported(node)
    }
    # Python 3.10 has no tomllib.
    actual -= {"__future__", PACKAGE.name, "tomllib", *sys.stdlib_module_names}
    required = {re.split(r"[^\w]", line)[0] for line in requirements([])}
    optional = {
        re.split(r"[^\w]", line)[0]
        for line in requirements(["eval", "float8", "ft", "plot", "report", "wandb"])
    } - required
    assert actual | NOT_IMPORTED == required | optional | INDIRECT.keys()
    assert set(INDIRECT.values()) <= required and len(required) <= 16


def test_two_modules_unpickle_files() -> None:
    """DCP's reader and planner, and `dcp.load`, execute pickled code of a file."""
    loaders = r"\bpickle\.(load|loads|Unpickler)\b|torch\.load\(|dcp\.load\("
    calls = re.compile(loaders + "|FileSystemReader|DefaultLoadPlanner")
    shipped = CORE + sorted((ROOT / "scripts").rglob("*.py"))
    users = [path for path in shipped if calls.search(path.read_text())]
    modules = ("dcp_metadata", "unpickle")
    expected = [f"torchtitan_like/checkpoint/{module}.py" for module in modules]
    assert [name_of(path) for path in users] == expected


def test_no_file_has_reminder_comments() -> None:
    marks = re.compile(
        r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b"
    )
    texts = ALL + [
        ROOT / name for name in ("run_train.sh", "run_tests.sh", "scripts/setup_env.sh", ".ci/run")
    ]
    matches = [
        f"{name_of(path)}:{number}"
        for path in texts
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if marks.search(line)
    ]
    assert not matches


def test_every_folder_with_modules_is_a_package() -> None:
    """The rank pool imports functions by full module name. setuptools needs __init__.py."""
    folders = {
        path.parent for path in ALL if path.parent.is_relative_to(PACKAGE) or "tests" in path.parts
    }
    assert not sorted(
        name_of(folder) for folder in folders if not (folder / "__init__.py").exists()
    )


def top_package(module: str) -> str:
    return module.split(".")[0]


def imported(node: ast.AST) -> list[str]:
    """Return the full names of the modules that an import statement may load."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package_of(module: str) -> str:
    """Return the package of a module. The files next to `train.py` are one package."""
    name = module.split(".")[1]
    return name if (PACKAGE / name).is_dir() else PACKAGE.name


def import_graph() -> dict[str, set[str]]:
    """Map each module of torchtitan_like to all its modules that it imports anywhere."""
    trees = {module_name(path): ast.parse(path.read_text()) for path in CORE}
    graph: dict[str, set[str]] = {module: set() for module in trees}
    for module, tree in trees.items():
        for name in (name for node in ast.walk(tree) for name in imported(node)):
            while name and name not in trees:
                name = name.rpartition(".")[0]
            if name not in ("", PACKAGE.name, module):
                graph[module].add(name)
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of modules that import each other, directly or through others."""
    reachable: dict[str, set[str]] = {}
    for start in graph:
        reachable[start], pending = set(), [start]
        while pending:
            new = graph[pending.pop()] - reachable[start]
            reachable[start] |= new
            pending += new
    sets = {
        tuple(sorted(other for other in reachable[module] if module in reachable[other]))
        for module in graph
        if module in reachable[module]
    }
    return [list(modules) for modules in sorted(sets)]


def at_import_time(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run on import: none in functions or under TYPE_CHECKING."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from at_import_time(node.orelse)
            continue
        for block in ("body", "orelse", "finalbody"):
            yield from at_import_time(getattr(node, block, []))
        for handler in getattr(node, "handlers", []):
            yield from at_import_time(handler.body)
