"""Every problem is reported before the job starts, with key, value, expectation and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from torchtitan_like.check import load_checked
from torchtitan_like.config import ConfigError, Problem


class Broken(NamedTuple):
    name: str
    toml: str
    expected: list[tuple[str, str]]  # (key, part of the message) of all problems, in any order
    arguments: tuple[str, ...] = ()
    world_size: int = 2
    origin: str = "broken.toml"


CASES = [
    Broken("typo in a key", "[training]\nstepz = 10", [("training.stepz", 'did you mean "training.steps"?')]),
    Broken("typo in a section", "[trainig]\nsteps = 10", [("trainig", 'did you mean "training"?')]),
    Broken("unknown section", "[xyz]\nx = 1", [("xyz", "sections are: job, profiling")]),
    Broken(
        "key in the wrong section", "[training]\nlr = 1e-3", [("training.lr", 'did you mean "optimizer.lr"?')]
    ),
    Broken("number in quotes", '[training]\nsteps = "3"', [("training.steps", "remove the quotes: 3")]),
    Broken("power of ten for a count", "", [("training.steps", "write 1000")], ("--training.steps=1e3",),
           origin="command line"),
    Broken("small number in quotes", '[optimizer]\nlr = "1e-3"', [("optimizer.lr", "remove the quotes: 1e-3")]),
    Broken("fraction for a count", "[training]\nsteps = 3.5", [("training.steps", "expected an integer > 0")]),
    Broken("word for a boolean", '[checkpoint]\nenable = "yes"', [("checkpoint.enable", "expected true or false")]),
    Broken("boolean for a number", "[optimizer]\nlr = true", [("optimizer.lr", "expected a number > 0")]),
    Broken("not a finite number", "[optimizer]\nlr = inf", [("optimizer.lr", "expected a number > 0")]),
    Broken(
        "string for a list",
        '[checkpoint]\nexclude_from_loading = "optimizer"',
        [("checkpoint.exclude_from_loading", "expected a list of:")],
    ),
    Broken("number for a string", "[activation_checkpoint]\nselective_ac_option = 2",
           [("activation_checkpoint.selective_ac_option", 'put it in quotes: "2"')]),
    Broken("list for a string", "[job]\ndescription = []",
           [("job.description", "job.description = []: expected a string")]),
    Broken("conflict with a default", "[profiling]\nenable_profiling = true\nprofiler_active = 20",
           [("profiling.profile_freq", "= 10: expected at least profiler_warmup + profiler_active = 23")]),
    Broken("value for a section", "training = 3", [("training", "expected a table of settings")]),
    Broken("bad choice", '[activation_checkpoint]\nmode = "fulll"',
           [("activation_checkpoint.mode", 'did you mean "full"?')]),
    Broken("bad choice in a list", '[compile]\ncomponents = ["modell"]',
           [("compile.components", 'did you mean "model"?')]),
    Broken("out of range", "[training]\nsteps = -3", [("training.steps", "= -3: expected an integer > 0")]),
    Broken("zero instead of -1", "[parallelism]\ndata_parallel_shard_degree = 0",
           [("parallelism.data_parallel_shard_degree", "expected -1 or an integer > 0")]),
    Broken("only one checkpoint kept", "[checkpoint]\nkeep_latest_k = 1",
           [("checkpoint.keep_latest_k", "expected 0 or an integer >= 2")]),
    Broken("profiling cycle too short", "[profiling]\nenable_profiling = true\nprofile_freq = 3",
           [("profiling.profile_freq", "set profile_freq to 4 or more")]),
    Broken("HF save with optimizer", "[checkpoint]\nenable = true\nlast_save_in_hf = true\nlast_save_model_only = false",
           [("checkpoint.last_save_in_hf", "set checkpoint.last_save_model_only = true")]),
    Broken("warm start without weights", '[checkpoint]\nenable = true\nstart = "warm"',
           [("checkpoint.start", "set checkpoint.initial_load_path")]),
    Broken("setting under both names", "[training]\nbatch_size = 4\nlocal_batch_size = 8",
           [("training.batch_size", "remove training.batch_size")]),
    Broken("setting under two older names",
           "[experimental]\npipeline_parallel_degree = 1\n[training]\npipeline_parallel_degree = 2",
           [("training.pipeline_parallel_degree", "remove training.pipeline_parallel_degree")]),
    Broken("source without a path", '[data.sources.wiki]\nformat = "text"',
           [("data.sources.wiki.path", "add `path = ...`")]),
    Broken("sources without a weight", '[data.sources.wiki]\npath = "tests/assets/tokenizer/tokenizer.json"\nweight = 0',
           [("data.sources", "give one source a weight")]),
    Broken("unordered weight steps",
           '[data.sources.wiki]\npath = "tests/assets/tokenizer/tokenizer.json"\nweight_from = [[20, 1.0], [10, 2.0]]',
           [("data.sources.wiki.weight_from", "in order of the steps")]),
    Broken("a weight that is not a number",
           '[data.sources.wiki]\npath = "tests/assets/tokenizer/tokenizer.json"\nweight_from = [[20, "much"]]',
           [("data.sources.wiki.weight_from", "a list of pairs, [[step, weight], ...]")]),
    Broken("skipped steps without a last step", "[training]\nskip_steps = [[100]]",
           [("training.skip_steps", "[[first, last], ...], 1 <= first <= last")]),
    Broken("skipped steps that are not pairs", "[training]\nskip_steps = [100]",
           [("training.skip_steps", "a list of pairs of steps, [[first, last], ...]")]),
    Broken("a ramp without a global batch size", "[training]\nbatch_ramp = [8, 8, 1000]",
           [("training.batch_ramp", "[start, increment, samples], all > 0")]),
    Broken("a ramp that misses the global batch size", "[training]\nglobal_batch_size = 32\nbatch_ramp = [8, 5, 1000]",
           [("training.batch_ramp", "start + a multiple of increment is global_batch_size")]),
    Broken("batch not divisible", "[training]\nlocal_batch_size = 4\nglobal_batch_size = 100",
           [("training.global_batch_size", "4 x 2 = 8")]),
    Broken("missing tokenizer", '[model]\nhf_assets_path = "./nowhere"',
           [("model.hf_assets_path", "there is nothing at nowhere below")]),
    Broken("missing dataset", '[training]\ndataset_path = "./nowhere.txt"',
           [("training.dataset_path", "there is nothing at nowhere.txt below")]),
    Broken("missing curve", '[validation]\nenable = true\ndataset = "shakespeare_validation"\nreference_curve = "no.csv"',
           [("validation.reference_curve", 'there is nothing at no.csv below')]),
    Broken("malformed curve",
           '[validation]\nenable = true\ndataset = "shakespeare_validation"\nreference_curve = "README.md"',
           [("validation.reference_curve",
             "seed,tokens,bits_per_byte; line 1 lacks the column seed")]),
    Broken("object storage", '[training]\ndataset_path = "s3://bucket/corpus"',
           [("training.dataset_path", "data at s3:// cannot be read")]),
    Broken("object storage of a source", '[data.sources.wiki]\npath = "gs://bucket/*.jsonl"',
           [("data.sources.wiki.path", "data at gs:// cannot be read")]),
    Broken("glob without files", '[data.sources.wiki]\npath = "./no/*.jsonl"',
           [("data.sources.wiki.path", "there is nothing at")]),
    Broken("stream of token files", '[data.sources.wiki]\npath = "README.md"\nformat = "tokens"\nstreaming = true',
           [("data.sources.wiki.streaming", "token files are read in place")]),
    Broken("missing token files", '[data.sources.wiki]\npath = "./no/wiki"\nformat = "tokens"',
           [("data.sources.wiki.path", "there is nothing at no/wiki below")]),
    Broken("unknown dataset", '[training]\ndataset = "shakespear"',
           [("training.dataset", 'did you mean "shakespeare"?')]),
    Broken("unknown model", '[model]\nname = "llama33"', [("model.name", 'did you mean "llama3"?')]),
    Broken("unknown flavor", '[model]\nflavor = "debugmodl"', [("model.flavor", 'did you mean "debugmodel"?')]),
    Broken("unknown model argument", "[model.args]\ndimm = 128", [("model.args", "did you mean \"dim\"?")]),
    Broken("heads do not divide the dimension", "[model.args]\nn_heads = 7",
           [("model.args", "expected a multiple of 2 x n_heads = 14")]),
    Broken("kv heads do not divide the heads", "[model.args]\nn_kv_heads = 3",
           [("model.args", "expected a divisor of n_heads = 16")]),
    Broken("kv heads not sharded by TP",
           "[model.args]\nn_kv_heads = 2\n[parallelism]\ntensor_parallel_degree = 4\n[training]\nseq_len = 512",
           [("parallelism.tensor_parallel_degree", "a divisor of the model's 2 key-value heads")],
           world_size=4),
    Broken("vocabulary too small", "[model.args]\nvocab_size = 1000",
           [("model.hf_assets_path", "the model has a vocabulary of 1000")]),
    Broken("sequence longer than the rotary table", "[model.args]\nmax_seq_len = 1024",
           [("training.seq_len", "at most the model's max_seq_len = 1024")]),
    Broken("layout does not fit the world", "[parallelism]\ndata_parallel_shard_degree = 3",
           [("parallelism", "but the world has 2 ranks")]),
    Broken("missing base", 'extends = "nowhere.toml"', [("extends", "contains: broken.toml")]),
    Broken("base that is not a path", "extends = 3", [("extends", "the path of one TOML file")]),
    Broken("file that extends itself", 'extends = "broken.toml"', [("extends", "broken.toml -> broken.toml")]),
    Broken("TOML syntax", "[training]\nsteps = \n", [("", "valid TOML; Invalid value (at line 2, column 9)")]),
    Broken("accumulation with the optimizer in backward",
           "[optimizer]\nearly_step_in_backward = true\n[training]\nglobal_batch_size = 32",
           [("optimizer.early_step_in_backward", "gradient accumulation over 2 passes")]),
    Broken("non-finite steps skipped by the optimizer in backward",
           '[optimizer]\nearly_step_in_backward = true\n[resilience]\non_nonfinite = "skip"',
           [("resilience.on_nonfinite", "no update can be skipped")]),
    Broken("spikes skipped by the optimizer in backward",
           '[optimizer]\nearly_step_in_backward = true\n[resilience]\non_spike = "skip"',
           [("resilience.on_spike", 'or on_spike = "log"')]),
    Broken("overflow detection inside compiled code", "[debug]\ndetect_overflow = true\n[compile]\nenable = true",
           [("debug.detect_overflow", "set compile.enable = false while you search")]),
    Broken("a run time that is neither a number nor auto", '[resilience]\nmax_runtime_minutes = "long"',
           [("resilience.max_runtime_minutes", 'a number of minutes >= 0 and <= 100000000, or "auto"')]),
    Broken("a timeout of too many seconds", "[comm]\ninit_timeout_seconds = 100_000_000_000_000",
           [("comm.init_timeout_seconds", "an integer > 0 and <= 1000000000")]),
    Broken("a run time beyond all valid dates", "[resilience]\nmax_runtime_minutes = 1e12",
           [("resilience.max_runtime_minutes", "a number of minutes >= 0 and <= 100000000")]),
    Broken("traced steps below one", "[debug]\ndetect_overflow = true\ntrace_batch_nums = [0]",
           [("debug.trace_batch_nums", "a list of steps >= 1")]),
    Broken("debug mode with selective recomputation",
           '[activation_checkpoint]\nselective_ac_option = "op"\ndebug = true',
           [("activation_checkpoint.debug", 'or selective_ac_option = "1"')]),
    Broken("debug mode with compiled code",
           '[activation_checkpoint]\nmode = "full"\ndebug = true\n[compile]\nenable = true',
           [("activation_checkpoint.debug", "set it to false, or compile.enable = false")]),
    Broken("memory budget without a partitioner",
           '[activation_checkpoint]\nmode = "memory_budget"\n[compile]\nenable = true\nbackend = "eager"',
           [("compile.backend", 'set it to "inductor"')]),
    Broken("an infinite size", "[model.args]\nffn_dim_multiplier = inf", [("model.args", "ffn_dim_multiplier = inf")]),
    Broken("memory budget without a compiler", '[activation_checkpoint]\nmode = "memory_budget"',
           [("activation_checkpoint.mode", "set compile.enable = true")]),
    Broken("missing checkpoint to start from",
           '[checkpoint]\nenable = true\nstart = "warm"\ninitial_load_path = "./nowhere/step-5"',
           [("checkpoint.initial_load_path", "there is nothing at nowhere/step-5")]),
    Broken("CLI: typo", "", [("training.stepz", 'did you mean "training.steps"?')], ("--training.stepz", "3"),
           origin="command line"),
    Broken("CLI: no section", "", [("steps", 'write --training.steps 3')], ("--steps", "3"),
           origin="command line"),
    Broken("CLI: wrong type", "", [("training.steps", "expected an integer > 0")], ("--training.steps", "many"),
           origin="command line"),
    Broken("CLI: no value", "", [("training.steps", "write --training.steps VALUE")], ("--training.steps",),
           origin="command line"),
    Broken("CLI: word without an option", "", [("", 'not the word "now"')], ("--checkpoint.enable", "now"),
           origin="command line"),
    Broken("CLI: bytes that are not UTF-8", "", [("", r'UTF-8 text, not "--job.dump_folder=\xff"')],
           ("--job.dump_folder=\udcff",), origin="command line"),
    Broken("CLI: value for a no_ flag", "", [("checkpoint.no_enable", "the flag itself means false")],
           ("--checkpoint.no_enable=true",), origin="command line"),
]  # fmt: skip


def problems_of(
    tmp_path: Path, toml: str, arguments: tuple[str, ...] = (), world_size: int = 2
) -> list[Problem]:
    file = tmp_path / "broken.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        load_checked(["--job.config_file", str(file), *arguments], world_size, training=True)
    return [problem for problem in caught.value.problems if problem.severity == "error"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_broken_config_is_refused(
    case: Broken, tmp_path: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repo_root)
    problems = problems_of(tmp_path, case.toml, case.arguments, case.world_size)
    assert sorted(problem.key for problem in problems) == sorted(key for key, _ in case.expected), (
        problems
    )
    for key, part in case.expected:
        assert any(problem.key == key and part in str(problem) for problem in problems), problems
    assert all(problem.origin.endswith(case.origin) for problem in problems)


def test_all_problems_are_reported_together(
    tmp_path: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error covers schema, sections, layout, model, files and the command line."""
    monkeypatch.chdir(repo_root)
    toml = """
        [training]
        stepz = 3
        steps = "4"
        [checkpoint]
        enable = true
        keep_latest_k = 1
        last_save_in_hf = true
        last_save_model_only = false
        [model]
        flavor = "9B"
        hf_assets_path = "./nowhere"
        [parallelism]
        data_parallel_shard_degree = 3
        [experimental]
        custom_args_module = "my.module"
    """
    problems = problems_of(tmp_path, toml, ("--optimizer.lr=fast",))
    assert {problem.key for problem in problems} == {
        "training.stepz", "training.steps", "checkpoint.keep_latest_k", "checkpoint.last_save_in_hf", "model.flavor",
        "model.hf_assets_path", "parallelism", "experimental.custom_args_module",
        "optimizer.lr",
    }  # fmt: skip


def test_a_refused_value_causes_no_other_problem(
    tmp_path: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules skip refused values. With the default of 8, 30 would also break a rule."""
    monkeypatch.chdir(repo_root)
    problems = problems_of(tmp_path, '[training]\nlocal_batch_size = "5"\nglobal_batch_size = 30')
    assert [problem.key for problem in problems] == ["training.local_batch_size"]


def test_a_circle_of_three_files_is_refused(tmp_path: Path) -> None:
    for name, base in (("a", "b"), ("b", "c"), ("c", "b")):
        (tmp_path / f"{name}.toml").write_text(f'extends = "{base}.toml"')
    with pytest.raises(ConfigError, match=r"b\.toml -> c\.toml -> b\.toml"):
        load_checked(["--job.config_file", str(tmp_path / "a.toml")], None, training=False)


def test_a_missing_config_file_lists_the_files_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "debug.toml").touch()
    with pytest.raises(ConfigError, match=r"contains: debug\.toml"):
        load_checked(["--job.config_file", str(tmp_path / "another.toml")], None, training=False)


def test_format_of_a_problem() -> None:
    problem = Problem("training.steps", -3, "an integer > 0", "use 10", "debug.toml")
    assert str(problem) == "debug.toml: training.steps = -3: expected an integer > 0 -> use 10"
