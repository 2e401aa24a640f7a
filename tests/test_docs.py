"""What the documentation says is kept true by these: generated parts, links, commands, options, what was run."""

import ast
import re
import shlex
import subprocess
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import drawings
import pytest
import reference
import typer
import yaml

from speculators.cli import COMMANDS
from speculators.training.options import TrainOptions

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NAMES = [page.relative_to(DOCS).as_posix() for page in PAGES]
# The site, and what is read beside the code.
DOCUMENTS = [*PAGES, *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("examples/**/*.md")), ROOT / "benchmarks/README.md"]
DOCUMENT_NAMES = [page.relative_to(ROOT).as_posix() for page in DOCUMENTS]
# Options of vLLM's that the pages give to `speculators serve`.
VLLM_OPTIONS = {
    "--api-key", "--data-parallel-address", "--data-parallel-hybrid-lb", "--data-parallel-rpc-port",
    "--data-parallel-size", "--data-parallel-size-local", "--data-parallel-start-rank",
    "--default-chat-template-kwargs", "--distributed-executor-backend", "--enforce-eager", "--headless",
    "--master-addr", "--max-model-len", "--nnodes", "--node-rank", "--speculative-config",
}  # fmt: skip


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown names them."""
    found: set[str] = set()
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        number = 1
        while slug in found:
            slug = f"{re.sub(r'_[0-9]+$', '', slug)}_{number}"
            number += 1
        found.add(slug)
    return found


@cache
def source_of_tests() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py")))


def blocks(text: str) -> Iterator[str]:
    """Fenced bash blocks, and blocks that are indented by four spaces."""
    yield from re.findall(r"^```(?:bash|sh|shell)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    unfenced = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"(?:^ {4}\S.*\n(?:^ {4,}\S.*\n)*)", unfenced, flags=re.MULTILINE)


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command line of ours, after `speculators`."""
    for block in blocks(text):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            ours = re.match(r"\s*(?:\w+=\S*\s+|\$ )*(?:speculators|torchrun\b.*? -m speculators) +(.*)", line)
            if ours:
                words = shlex.split(re.sub(r"\$\{?\w+\}?", "1", ours[1]), comments=True)
                end = next((i for i, w in enumerate(words) if w in {"|", "&", "&&", ";", "..."} or ">" in w[:2]), None)
                yield words[:end]


def problem(words: list[str]) -> str | None:
    """What the command line would say against the words themselves; None if they parse."""
    name, *arguments = words
    if name not in COMMANDS:
        return None if name.startswith("-") else f"no command {name}"
    try:
        context = reference.command_of(name).make_context(name, arguments)
    except typer.TyperException as error:
        return error.format_message()
    unknown = [word for word in context.args if word.startswith("--") and word not in VLLM_OPTIONS]
    return f"{unknown[0]} is no option of serve, nor one of VLLM_OPTIONS" if unknown else None


def test_generated_pages_and_schemas_are_what_the_code_says():
    made = reference.generated()
    stale = [path.name for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    strangers = [path.name for path in (DOCS / "reference" / "schemas").glob("*.json") if path not in made]
    assert stale + strangers == [], "run `python docs/reference.py`"


def test_drawings_are_what_their_script_draws():
    stale = [n for n, draw in drawings.DRAWINGS.items() if (DOCS / "images" / n).read_text("utf-8") != draw()]
    assert stale == [], "run `python docs/drawings.py`"


@pytest.mark.parametrize("page", DOCUMENTS, ids=DOCUMENT_NAMES)
def test_relative_links_and_their_anchors_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"\w+:", target):
            assert target.startswith(("https://", "mailto:")), target
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert page not in PAGES or file.is_relative_to(DOCS), f"{target} is outside of the site"
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", DOCUMENTS, ids=DOCUMENT_NAMES)
def test_commands_have_the_options_that_they_are_given(page):
    wrong = [(words, why) for words in commands(page.read_text(encoding="utf-8")) if (why := problem(words))]
    assert wrong == []


@pytest.mark.parametrize("page", DOCUMENTS, ids=DOCUMENT_NAMES)
def test_code_blocks_are_code(page):
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    for language, code in fenced:
        if language == "python":
            ast.parse(code)
        elif language == "yaml":
            list(yaml.safe_load_all(code))
        elif language == "bash":
            checked = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)
            assert checked.returncode == 0, checked.stderr
        else:
            assert language in {"", "text", "nginx"}, f"a block of {language}, which nothing checks"


def test_a_wrong_option_or_command_is_noticed():
    text = (
        "```bash\nspeculators train --data d \\\n  --no-such-thing 3\nFOO=1 speculators serve m --hiden-path x\n```\n"
    )
    text += "\n    speculators bnech --tasks code\n    speculators report output/bench > file\n"
    assert [problem(words) is None for words in commands(text)] == [False, False, False, True]


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_an_algorithms_page_has_all_of_its_options(algorithm):
    page = (DOCS / "algorithms" / f"{algorithm}.md").read_text(encoding="utf-8")
    own = [n for n, f in TrainOptions.model_fields.items() if (f.json_schema_extra or {}).get("only") == algorithm]
    assert [name for name in own if f"| `--{name.replace('_', '-')}` |" not in page] == []


def test_every_tutorial_says_what_was_run():
    silent = [page.name for page in (DOCS / "tutorials").glob("*.md") if "\n## What was run\n" not in page.read_text()]
    assert silent == []


@pytest.mark.parametrize("name", NAMES)
def test_commands_stand_beside_a_word_on_whether_they_were_run(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    if "\n## What was run\n" in text:
        return
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    silent = [s.splitlines()[0] for s in sections if "```bash" in s and not re.search(r"\brun (here|on|by)\b", s, re.I)]
    assert silent == []


@pytest.mark.parametrize("page", DOCUMENTS, ids=DOCUMENT_NAMES)
def test_tests_that_are_named_exist(page):
    text = page.read_text(encoding="utf-8")
    files = {f for f in re.findall(r"`(tests/[\w/.]*)`", text) if not (ROOT / f).exists()}
    bare = {f for f in re.findall(r"`(test_\w+\.py)`", text) if not list((ROOT / "tests").rglob(f))}
    functions = {f for f in re.findall(r"`(test_\w+)`", text) if f"def {f}(" not in source_of_tests()}
    assert files | bare | functions == set()


@pytest.mark.parametrize("part", ["results", "agreement"])
def test_the_start_page_shows_the_readmes_words_on_the_quickstart(part):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.split(f"<!-- --8<-- [start:{part}] -->")[1].split(f"<!-- --8<-- [end:{part}] -->")[0]
    assert len(shown.strip().splitlines()) > 5
    assert "](docs/" not in shown, (
        "a link that is right in the README is wrong on the site; keep it outside of the part"
    )
    assert f'\n--8<-- "README.md:{part}"\n' in (DOCS / "index.md").read_text(encoding="utf-8")


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = re.findall(r"[\w/-]+\.md", yaml.safe_dump(site["nav"]))
    assert sorted(listed) == NAMES
    assert site["theme"]["font"] is False
    assert not {"extra_css", "extra_javascript"} & set(site)


def test_modules_of_the_python_reference_are_there():
    named = re.findall(r"^::: ([\w.]+)$", (DOCS / "reference" / "python.md").read_text(), flags=re.MULTILINE)
    missing = [name for name in named if not (ROOT / name.replace(".", "/")).with_suffix(".py").exists()]
    assert named
    assert missing == []
