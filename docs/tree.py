"""The README's tree: a line a file, the first sentence of its docstring. `python docs/tree.py` rewrites it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("speculators", "serve", "bench")
BEGIN, END = "<!-- tree -->", "<!-- /tree -->"


def first_sentence(file: Path) -> str:
    """What a module says it is, up to its first full stop, colon or semicolon."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split()).replace("`", "")
    return re.split(r"(?<=\w)[.;](?:\s|$)", paragraph)[0]


def tree() -> str:
    """The listing: a directory a block, a file a line."""
    lines = []
    for package in PACKAGES:
        for directory in sorted({file.parent for file in (ROOT / package).rglob("*.py")}):
            name = directory.relative_to(ROOT).as_posix() + "/"
            lines.append(f"{name:28s} {first_sentence(directory / '__init__.py')}".rstrip())
            files = [file for file in sorted(directory.glob("*.py")) if file.name != "__init__.py"]
            lines += [f"    {file.name:24s} {first_sentence(file)}" for file in files]
    return "\n".join(lines)


def rewritten(readme: str) -> str:
    """The README with its tree brought up to date."""
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n```\n{tree()}\n```\n\n{END}{after}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
