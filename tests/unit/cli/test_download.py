"""`titan download`: selected files, output folder, and errors."""

from __future__ import annotations

from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from torchtitan_like.checkpoint.hf import download
from torchtitan_like.cli import main

FILES = {
    "README.md": 10,
    "config.json": 20,
    "tokenizer.json": 30,
    "original/tokenizer.model": 40,
    "tiktoken.model": 50,
    "original/consolidated.00.pth": 10**9,
    "model-00001-of-00001.safetensors": 2**20,
    "model.safetensors.index.json": 60,
}


class Hub:
    """Replaces the Hub: one model. Records the downloads; raises `error` if it is set."""

    def __init__(self) -> None:
        self.downloads: list[dict[str, object]] = []
        self.error: Exception | None = None

    def __call__(self, token: str | None) -> Hub:  # HfApi(token=...)
        return self

    def model_info(self, repo_id: str, revision: str, files_metadata: bool) -> SimpleNamespace:
        if self.error:
            raise self.error
        files = [SimpleNamespace(rfilename=name, size=size) for name, size in FILES.items()]
        return SimpleNamespace(sha="c0ffee", siblings=files)

    def snapshot_download(self, repo_id: str, **arguments: object) -> None:
        self.downloads.append(arguments)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        ([], ["config.json", "original/tokenizer.model", "tiktoken.model", "tokenizer.json"]),
        (["--assets", "index"], ["model.safetensors.index.json"]),
        (
            ["--assets", "config", "--additional_patterns", "*.md"],
            ["README.md", "config.json"],
        ),
        (["--all"], sorted(set(FILES) - {"README.md", "original/consolidated.00.pth"})),
    ],
)
def test_selected_files_are_downloaded_by_commit_into_the_models_folder(
    hub, tmp_path, capsys, arguments, files
) -> None:
    command = ["download", "--repo-id", "owner/Model-1B", "--local-dir", str(tmp_path)]
    assert main([*command, *arguments]) == 0
    [call] = hub.downloads
    assert call["allow_patterns"] == files
    assert call["revision"] == "c0ffee"
    assert call["local_dir"] == tmp_path / "Model-1B"
    assert f"--model.hf_assets_path {tmp_path / 'Model-1B'}" in capsys.readouterr().out


def test_a_dry_run_lists_files_and_downloads_none(hub, tmp_path, capsys) -> None:
    """TorchTitan's spelling of options is accepted."""
    command = ["download", "--repo_id", "owner/m", "--local_dir", str(tmp_path)]
    assert main([*command, "--assets", "safetensors", "--dry_run"]) == 0
    assert hub.downloads == []
    assert "model-00001-of-00001.safetensors (1.0 MiB)" in capsys.readouterr().out


def response(status: int) -> SimpleNamespace:
    return SimpleNamespace(status_code=status, headers={}, request=None, url="")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            errors.GatedRepoError("no", response=response(403)),
            "accept it at https://huggingface.co/owner/m",
        ),
        (errors.RepositoryNotFoundError("no", response=response(404)), "the model does not exist"),
        (errors.RevisionNotFoundError("no", response=response(404)), "no revision 'main'"),
        (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
        (ConnectionError("refused"), "has no access to the Hub"),
    ],
)
def test_each_failure_reports_a_remedy_and_returns_1(hub, capsys, error, text) -> None:
    hub.error = error
    assert main(["download", "--repo-id", "owner/m"]) == 1
    assert text in capsys.readouterr().err
    assert hub.downloads == []


@pytest.mark.parametrize("name", ["", "a/b/c", "/b", "a/", "a b/c", "a/b--c", "../b", "a/-b"])
def test_a_malformed_name_is_refused_without_the_network(hub, capsys, name) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["download", f"--repo-id={name}"])
    assert f"argument --repo-id/--repo_id: it is {name!r}. Expected OWNER/NAME" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["gpt2", "openai-community/gpt2", "Qwen/Qwen3-0.6B", "a/b_c.d"])
def test_names_of_the_hub_are_accepted(hub, capsys, name) -> None:
    assert main(["download", "--repo-id", name, "--dry-run"]) == 0


def test_no_matching_file_is_a_failure(hub, capsys, monkeypatch) -> None:
    monkeypatch.setitem(download.ASSETS, "config", ("nothing.json",))
    assert main(["download", "--repo-id", "owner/m", "--assets", "config"]) == 1
    assert "none of the model's 8 files matches" in capsys.readouterr().err
