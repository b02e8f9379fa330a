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


PAGES = pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))


@PAGES
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    for file, fragment in links(page):
        assert file.exists(), f"{page.name}: {file}"
        if fragment:
            assert fragment in anchors(file), f"{page.name}: {file.name}#{fragment}"


@PAGES
def test_every_file_and_module_that_a_page_names_exists(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for name in SOURCE.findall(text):
        assert any(
            (place / name).is_file() for place in (ROOT, ROOT / "mfsdp_core", page.parent)
        ), name
    folders = {*page.relative_to(ROOT).parts}
    if page.name == "README.md" and "docs" not in folders:
        for name in re.findall(r"`(\w+\.py)`", text):
            assert any(f.name == name and page.parent in f.parents for f in sources()), name
    # Measurements and the changelog name what was, excerpts name files of others.
    if page.name == "CHANGELOG.md" or {"evidence", "logs"} & folders:
        return
    for name in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(rf"{TOP}/[\w./*-]*", name):
            assert any(ROOT.glob(name)), name
        elif (found := re.match(rf"{TOP}(?:\.\w+)+", name)) and not (ROOT / name).exists():
            assert_exists_in_its_module(found[0].split("."))


def assert_exists_in_its_module(rest: list[str]) -> None:
    place = ROOT
    while rest and (place / rest[0]).is_dir():
        place /= rest.pop(0)
    module = place / "__init__.py"
    if rest and (place / f"{rest[0]}.py").is_file():
        module = place / f"{rest.pop(0)}.py"
    text = module.read_text()
    for attribute in rest:
        assert re.search(rf"\b{attribute}\b", text), f"{module}: {attribute}"


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


def test_every_page_that_code_and_data_name_exists() -> None:
    missing = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in [*sources(), *files("*.yaml"), *files("*.yml"), *files("*.sh")]
        for name in re.findall(r"\bdocs/[\w/-]+\.md\b", file.read_text())
        if "logs" not in file.parts and not (ROOT / name).exists()
    ]
    assert not missing, missing


@pytest.mark.parametrize(("pages", "most"), [("docs/*.md", 18_000), ("README.md", 1_000)])
def test_pages_stay_short(pages: str, most: int) -> None:
    """Words are what has a letter or a digit."""
    words = [w for p in ROOT.glob(pages) for w in p.read_text().split() if re.search(r"\w", w)]
    assert len(words) <= most, f"{pages}: {len(words):,} words: take out as many as come"
