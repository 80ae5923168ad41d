"""What all figures of a report share: their style, sizes in inches, panels, the legend under them, and files."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import Any, Literal, NamedTuple

from matplotlib import rc_context, rc_params_from_file, rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from PIL import Image  # matplotlib's own dependency

from kernels.temporary import replacing

STYLE = Path(__file__).with_name("paper.mplstyle")
_style = rc_params_from_file(STYLE, use_default_template=False)
INK, SOFT = (_style[key] for key in ("text.color", "axes.edgecolor"))
COLOURS: list[str] = _style["axes.prop_cycle"].by_key()["color"]
CostName = Literal["read", "held", "kv_device", "moved", "ttft", "tpot"]
FORMATS = (".pdf", ".svg", ".png")
WIDTHS = {"single": 3.3, "double": 7.0}  # inches: of a paper's column, and of its page
SMALLEST = 7  # points of type
LETTER = 0.56  # width of a letter as a share of its height, the mean of DejaVu Sans
NARROWEST, LOWEST = 1.6, 1.2  # inches of a panel
CLOSE = 2  # points between names of ticks
NARROWEST_NAME = 0.6  # inches of a column of the legend
MOST_COLUMNS = 4
DPI = 160  # of the report's page
WIDEST = 2400  # pixels


@dataclass(frozen=True, kw_only=True)
class Look:
    """Say how a figure is drawn: the section `figure` of a file for `--paper`."""

    # inches; single, double: of a column of a paper, and of its page; null: what its panels need
    width: Literal["single", "double"] | float | None = "single"
    height: float | None = None  # inches; null: what its panels and its legend need
    font: float = 8  # points; numbers at axes and at points are one smaller, but no smaller than 7
    # what stands side by side if there are several of both
    panels: Literal["task", "model"] = "task"
    columns: int | None = None  # panels in a row; null: as many as fit
    costs: Sequence[CostName] = ("read", "held", "moved", "tpot")  # that scores are drawn against
    groups: Sequence[str] = ()  # parts of the tasks' groups, each of which has panels of its own

    def __post_init__(self) -> None:
        for name, least in (("width", 1), ("height", 1), ("font", SMALLEST), ("columns", 1)):
            value = getattr(self, name)
            if isinstance(value, (int, float)) and value < least:
                raise ValueError(f"figure: {name}: {value} cannot be read: give at least {least}.")

    @property
    def inches(self) -> float | None:
        return WIDTHS[self.width] if isinstance(self.width, str) else self.width

    @property
    def small(self) -> float:
        """The points of the smallest type: numbers at axes, in cells and at points."""
        return max(SMALLEST, self.font - 1)


class Drawn(NamedTuple):
    """A figure, and what a paper's caption says of it. A notebook shows the figure."""

    figure: Figure
    caption: str

    def _repr_png_(self) -> bytes:
        return png(self.figure)


class Panels(NamedTuple):
    """A figure and its panels."""

    figure: Figure
    axes: list[Axes]
    columns: int  # in which they stand
    height: float  # inches of what is drawn in one
    letters: int  # that are as wide as the text of a panel may be

    def fill(self, text: str) -> str:
        """Break a text into lines that are no wider than a panel."""
        return textwrap.fill(text, self.letters, break_on_hyphens=False)

    def label(self, across: str, up: str) -> None:
        """Say at the left and at the bottom of the figure what all panels show across and up."""
        for place, axes in enumerate(self.axes):
            axes.set_ylabel(up if place % self.columns == 0 else "")
            axes.set_xlabel(across if place + self.columns >= len(self.axes) else "")

    def share_names(self) -> None:
        """Leave the names of ticks to the panels at the left, and to those with none below them."""
        for place, axes in enumerate(self.axes):
            is_lowest = place + self.columns >= len(self.axes)
            axes.tick_params(labelleft=place % self.columns == 0, labelbottom=is_lowest)


@contextmanager
def styled(look: Look = Look()) -> Iterator[None]:
    """Draw in the style of reports, whatever the user's own settings of matplotlib are."""
    sizes: Any = dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), look.small)
    with rc_context({**sizes, "font.size": look.font}, STYLE):
        yield


def panels(
    count: int,
    look: Look,
    width: float = 3.3,
    height: float | None = None,
    *,
    of_kind: int = 1,
    aside: float = 0,
    **shared: Any,
) -> Panels:
    """Return a figure with so many panels, in rows of as many as the look's width holds. `width`:
    inches that a panel needs. `height`: inches of what is drawn in it, if the look does not say; by
    default two thirds of the width. `of_kind`: how many panels of one kind follow each other; they
    get a row of their own if it has room for them. `aside`: inches beside the panels.
    `shared`: `sharex`, `sharey`."""
    fit = MOST_COLUMNS if look.inches is None else max(1, int(look.inches / NARROWEST))
    usual = of_kind if 1 < of_kind <= fit else ceil(count / ceil(count / fit))
    columns = min(count, look.columns or usual)
    rows = ceil(count / columns)
    whole = look.inches or columns * width
    inside = height or max(LOWEST, whole / columns * 2 / 3)
    figure = Figure(figsize=(whole, look.height or rows * (inside + 0.5)))
    FigureCanvasAgg(figure)  # measures text
    grid = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axes in grid[count:]:
        axes.remove()
    letters = max(1, int(60 * (whole - aside) / columns / LETTER / look.font))
    return Panels(figure, grid[:count], columns, inside, letters)


def lay_out(drawn: Panels, look: Look, handles: Sequence[Artist] = ()) -> None:
    """Put a legend under the panels, in as many columns as the figure's width holds, make the figure
    as high as all of it needs, unless its height is given, and fix the layout."""
    figure = drawn.figure
    most = int(figure.get_figwidth() / NARROWEST_NAME)
    for columns in range(min(len(handles), most), 0, -1):
        box = figure.legend(handles=handles, loc="outside lower center", ncols=columns)
        needs = box.get_window_extent(figure.canvas.get_renderer())  # type: ignore[attr-defined]
        if needs.width <= figure.bbox.width or columns == 1:
            figure.set_figheight(look.height or figure.get_figheight() + needs.height / figure.dpi)
            break
        box.remove()
    figure.draw_without_rendering()
    if look.height is None:
        inside = min(axes.bbox.height for axes in drawn.axes) / figure.dpi
        rows = ceil(len(drawn.axes) / drawn.columns)
        figure.set_figheight(figure.get_figheight() + rows * (drawn.height - inside))
        figure.draw_without_rendering()


def extent(axes: Axes, text: str, size: float) -> tuple[float, float]:
    """Return width and height in pixels of a text whose type has `size` points."""
    canvas = axes.figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    font = FontProperties(size=size)
    width, height, _ = canvas.get_renderer().get_text_width_height_descent(text, font, False)
    return width, height


def spaced(axes: Axes) -> None:
    """Leave out the names of ticks that would come close to the one before them. The figure's layout
    must be final."""
    gap = axes.figure.dpi * CLOSE / 72
    for axis, low, high in ((axes.xaxis, 0, 2), (axes.yaxis, 1, 3)):
        shown = [tick for tick in axis.get_ticklabels() if tick.get_visible() and tick.get_text()]
        extents = [tick.get_window_extent().extents for tick in shown]
        end = float("-inf")
        for extent, tick in sorted(zip(extents, shown, strict=True), key=lambda one: one[0][low]):
            tick.set_visible(extent[low] > end + gap)
            end = max(end, extent[high]) if tick.get_visible() else end


def tokens(length: float) -> str:
    """Return a number of tokens in few letters: 1K, 1.5K, 700."""
    return f"{length / 1024:g}K" if length >= 1024 and length % 512 == 0 else f"{length:g}"


def literal(text: str, typed: Iterable[str] = ()) -> str:
    """Return a text in which a $ does not begin mathematics, because a name from a record may hold
    one. If the text begins with one of `typed`, a $ in that part keeps its meaning."""
    own = max(filter(text.startswith, typed), key=len, default="")
    return own + text[len(own) :].replace("$", r"\$")


def title(figure: Figure, text: str, *below: str) -> None:
    """Set the title of a figure that stands alone; each of `below` is a line of its own under it."""
    letters = int(11 * figure.get_size_inches()[0])
    lines = textwrap.wrap(text, letters, break_long_words=False)
    if lines or below:
        figure.suptitle(literal("\n".join([*lines, *below])), x=0.01, ha="left")


def png(figure: Figure, dpi: float = DPI) -> bytes:
    """Return a figure as PNG bytes in 256 colours, which keeps a page with many figures small."""
    drawn, reduced = BytesIO(), BytesIO()
    figure.savefig(drawn, format="png", dpi=min(dpi, WIDEST / figure.get_size_inches()[0]))
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        reduced, "PNG", optimize=True
    )
    return reduced.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the name ends in (`FORMATS`): PDF and SVG are vectors."""
    drawn = BytesIO()
    undated = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    with styled():
        if path.suffix == ".png":
            drawn.write(png(figure, rcParams["savefig.dpi"]))
        else:
            figure.savefig(drawn, format=path.suffix[1:], metadata=undated[path.suffix])
    # in memory first: matplotlib makes another error of a full disk
    with replacing(path) as file:  # not through a link that a folder of somebody else's has there
        file.write(drawn.getvalue())
