"""The documents: every link leads somewhere, and every page can be reached from the README."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
SOURCE = re.compile(r"`((?:\w+/)+\w+\.py)`")
TOP = "(?:bench|mfsdp_core|reports|sweeps|tools|tests|docs)"
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def files(pattern: str) -> list[Path]:
    """Of the repository, and what is new in it; never those of an environment inside."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", pattern],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


@cache
def documents() -> list[Path]:
    return files("*.md")


@cache
def sources() -> list[Path]:
    return files("*.py")


def anchors(page: Path) -> set[str]:
    """Fragments of the headings, as forges make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {text.strip().replace(" ", "-") for text in plain}


def links(page: Path) -> list[tuple[Path, str]]:
    """Local targets of a page's links: file and fragment."""
    found = []
    for groups in LINK.findall(FENCE.sub("", page.read_text())):
        target = groups[0] or groups[1]
        if re.match(r"[a-z]+:", target):
            continue
        file, _, fragment = target.partition("#")
        found.append(((page.parent / file).resolve() if file else page, fragment))
    return found


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    for file, fragment in links(page):
        assert file.exists(), f"{page.name}: {file}"
        if fragment:
            assert fragment in anchors(file), f"{page.name}: {file.name}#{fragment}"


def named_in(page: Path) -> set[str]:
    """What a page names in backquotes, outside of its code blocks."""
    return set(re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text())))


#: Pages of today: measurements and the changelog name what was, excerpts name files of others.
CURRENT = [
    page
    for page in documents()
    if page.name != "CHANGELOG.md" and not {"evidence", "logs"} & {*page.relative_to(ROOT).parts}
]


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    for name in SOURCE.findall(FENCE.sub("", page.read_text())):
        places = (ROOT, ROOT / "mfsdp_core", page.parent)
        assert any((place / name).is_file() for place in places), f"{page.name}: {name}"


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    for name in named_in(page):
        if re.fullmatch(rf"{TOP}/[\w./*-]*", name):
            assert any(ROOT.glob(name)), f"{page.name}: {name}"


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_and_what_a_page_names_of_it_exists(page: Path) -> None:
    for name in named_in(page):
        if not (found := re.match(rf"{TOP}(?:\.\w+)+", name)) or (ROOT / name).exists():
            continue
        place, rest = ROOT, found[0].split(".")
        while rest and (place / rest[0]).is_dir():
            place /= rest.pop(0)
        module = place / "__init__.py"
        if rest and (place / f"{rest[0]}.py").is_file():
            module = place / f"{rest.pop(0)}.py"
        text = module.read_text()
        for attribute in rest:
            assert re.search(rf"\b{attribute}\b", text), f"{page.name}: {name}"


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in documents()
        if page.name == "README.md" and "docs" not in page.relative_to(ROOT).parts
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_file_of_its_room_that_a_readme_names_exists(page: Path) -> None:
    for name in re.findall(r"`(\w+\.py)`", FENCE.sub("", page.read_text())):
        found = [file for file in sources() if file.name == name and page.parent in file.parents]
        assert found, f"{page.relative_to(ROOT)}: {name}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    open_pages = [ROOT / "README.md"]
    while open_pages:
        page = open_pages.pop()
        seen.add(page)
        linked = {f / "README.md" if f.is_dir() else f for f, _ in links(page)}
        open_pages = [*{*open_pages, *linked & {*documents()}} - seen]
    unreachable = {page for page in documents() if ROOT / "docs" in page.parents} - seen
    assert sorted(str(page.relative_to(ROOT)) for page in unreachable) == []
