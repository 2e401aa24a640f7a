"""What the README claims about the repository is kept true by these."""

from pathlib import Path

import tree

ROOT = Path(__file__).parent.parent


def test_the_tree_in_the_readme_lists_every_file_with_what_it_is():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == tree.rewritten(readme), "run `python docs/tree.py`"


def test_every_module_says_what_it_is():
    silent = [f for p in tree.PACKAGES for f in (ROOT / p).rglob("*.py") if not tree.first_sentence(f)]
    assert silent == []


def test_no_file_is_longer_than_400_lines():
    files = [f for p in (*tree.PACKAGES, "tests") for f in (ROOT / p).rglob("*.py")]
    assert [f for f in files if len(f.read_text(encoding="utf-8").splitlines()) > 400] == []
