"""docs/reference/cli.md matches the parsers."""

from __future__ import annotations

from pathlib import Path

from scripts.cli_reference import markdown
from torchtitan_like.cli import executable_commands


def test_the_reference_page_is_up_to_date(repo_root: Path) -> None:
    """If this fails: python scripts/cli_reference.py > docs/reference/cli.md"""
    assert (repo_root / "docs/reference/cli.md").read_text() == markdown()


def test_every_command_has_a_section_with_an_example() -> None:
    text = markdown()
    for command in executable_commands():
        _, _, section = text.partition(f"### titan {command.name}\n")
        example = section.partition("```bash\n")[2].partition("\n")[0]
        assert example.startswith(f"titan {command.name}"), command.name
