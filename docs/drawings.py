"""The drawings of the documentation, as SVG. `python docs/drawings.py` writes them to docs/images.

Text stands on boxes with a fill of their own or in a middle grey, so that one file serves a light and a dark page. A
test compares what is committed with what this makes.
"""

from pathlib import Path
from xml.sax.saxutils import escape

from speculators.schema import write_text

DIRECTORY = Path(__file__).parent / "images"
GREY = "#788593"
FILLS = {"token": "#dfe6ee", "verifier": "#ffd9a8", "draft": "#b9dcff", "mask": "#cfd5dc", "out": "#bfe8c9"}
WIDTH = 760


class Drawing:
    """Shapes, collected in the order in which they are painted; lengths in pixels."""

    def __init__(self, height: int, title: str) -> None:
        self._height, self._title = height, title
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, text: str, kind: str, height: float = 30) -> None:
        """A labelled box with its upper left corner at (x, y)."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{FILLS[kind]}" '
            f'stroke="{GREY}"/>'
            f'<text x="{x + width / 2:g}" y="{y + height / 2 + 4.5:g}" fill="#1c2430" text-anchor="middle">'
            f"{escape(text)}</text>"
        )

    def note(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """Text outside of boxes; y is its base line."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" fill="{GREY}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line through the points, with a head at the last one."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{GREY}" stroke-width="1.6"{dash} marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """The whole file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="13">\n<title>{escape(self._title)}</title>\n'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker></defs>\n'
        )
        return head + "\n".join(self._parts) + "\n</svg>\n"


def eagle3() -> str:
    """One slot's chain of three steps."""
    d = Drawing(430, "eagle3: the chain of one slot")
    d.note(10, 24, "verifier, one pass over the text")
    for i, layer in enumerate(("2", "n/2", "n-3")):
        d.box(10 + 74 * i, 36, 68, f"layer {layer}", "verifier")
        d.arrow((44 + 74 * i, 66), (44 + 74 * i, 92))
    d.box(10, 94, 216, "fc: [3 H] to [H]", "draft")
    d.note(240, 113, "feature of position t")
    d.arrow((118, 124), (118, 178))
    columns = (10, 265, 520)
    for j, x in enumerate(columns):
        d.note(x if j else 132, 168, f"step {j}, position t + {j}" if j else "step 0, position t")
        d.box(x, 180, 104, "hidden" if not j else "own output", "draft")
        d.box(x + 112, 180, 104, f"token t + {1 + j}", "token")
        d.arrow((x + 52, 210), (x + 86, 238))
        d.arrow((x + 164, 210), (x + 130, 238))
        d.box(x, 240, 216, "layer 0 on [embedding, hidden]", "draft")
        d.arrow((x + 108, 270), (x + 108, 296))
        d.box(x, 298, 216, "norm, lm_head", "draft")
        d.arrow((x + 108, 328), (x + 108, 354))
        d.box(x + 40, 356, 136, f"token t + {2 + j}", "out")
        if j < 2:
            d.arrow((x + 216, 255), (x + 236, 255), (x + 236, 195), (x + 253, 195))
    d.note(10, 415, "Keys and values: slots up to t of step 0, and the chain's own later steps.")
    return d.svg()


def dflash() -> str:
    """One block of four slots at an anchor."""
    d = Drawing(440, "dflash: one block at an anchor")
    d.note(10, 24, "verifier, one pass over the text")
    for i in range(3):
        d.box(10 + 86 * i, 36, 78, f"features {i}", "verifier")
        d.arrow((49 + 86 * i, 66), (49 + 86 * i, 92))
    d.box(10, 94, 250, "fc, hidden_norm", "draft")
    d.arrow((135, 124), (135, 150))
    d.box(10, 152, 250, "keys and values of every layer", "draft")
    d.note(10, 204, "context: strictly before the anchor")
    x0 = 330
    d.box(x0, 36, 94, "token a", "token")
    for s in range(1, 4):
        d.box(x0 + 106 * s, 36, 94, "mask", "mask")
    d.note(x0, 24, "block: anchor and block_size - 1 mask slots")
    for s in range(4):
        d.note(x0 + 47 + 106 * s, 84, f"slot {s}", "middle")
        d.arrow((x0 + 47 + 106 * s, 92), (x0 + 47 + 106 * s, 150))
    d.box(x0, 152, 412, "layers: every slot sees the context and the whole block", "draft", 76)
    d.arrow((260, 167), (x0 - 3, 167))
    for s in range(1, 4):
        d.arrow((x0 + 47 + 106 * s, 228), (x0 + 47 + 106 * s, 262))
        d.box(x0 + 106 * s, 264, 94, "norm, head", "draft")
        d.arrow((x0 + 47 + 106 * s, 294), (x0 + 47 + 106 * s, 324))
        d.box(x0 + 106 * s, 326, 94, f"token a + {s}", "out")
    d.note(x0, 283, "slot 0 gives")
    d.note(x0, 299, "nothing")
    d.note(10, 388, "All tokens of a block come from one pass; the verifier then checks them in one pass of its own.")
    d.note(10, 410, "In training many anchors of a row are blocks at once, and no block sees another.")
    return d.svg()


DRAWINGS = {"eagle3.svg": eagle3, "dflash.svg": dflash}


def main() -> None:
    """Write every drawing."""
    for name, draw in DRAWINGS.items():
        write_text(DIRECTORY / name, draw())


if __name__ == "__main__":
    main()
