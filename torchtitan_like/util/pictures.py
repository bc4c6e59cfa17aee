"""Make pictures with matplotlib and write them as SVG or PNG.

They have no background, and gray text, so that they suit light and dark pages. The same picture has
the same bytes with the same release of matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_like.util.files import write_atomically
from torchtitan_like.util.modules import pip_install

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Metadata that would change with the time or the release, by the suffix of the file.
METADATA = {".svg": {"Creator": None, "Date": None}, ".png": {"Software": None}}
DPI = 100  # pixels per inch
GRAY = "#777777"
LIGHT_GRAY = "#88888844"
# Okabe and Ito's palette without its black and yellow: distinct for color-blind readers, visible on
# light and on dark pages.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
STYLE: dict[Any, Any] = {
    "axes.edgecolor": LIGHT_GRAY,
    "axes.facecolor": "none",
    "axes.labelcolor": GRAY,
    "font.size": 10,
    "grid.color": LIGHT_GRAY,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",  # text remains text
    "svg.hashsalt": "torchtitan_like",  # ids do not depend on the process
    "text.color": GRAY,
    "text.parse_math": False,  # names of runs may contain $
    "xtick.color": GRAY,
    "ytick.color": GRAY,
}


def check_picture(path: Path) -> None:
    """Raise ValueError if `path` has no suffix of `METADATA`, or matplotlib is not installed."""
    if path.suffix not in METADATA:
        raise ValueError(
            f"{path} is no name of a picture: its suffix is {path.suffix!r}. "
            f"Expected {' or '.join(METADATA)}. Rename the output."
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(
            "Pictures need matplotlib, which is not installed. Expected the package: "
            f"{pip_install('matplotlib')}"
        ) from None


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure, and write it to `path` when the block ends. Raises OSError.

    path: see `check_picture`. width, height: inches of `DPI` pixels.
    """
    import matplotlib
    from matplotlib.figure import Figure

    content = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure((width, height), layout="constrained")
        yield figure
        kind = path.suffix.removeprefix(".")
        figure.savefig(content, format=kind, dpi=DPI, metadata=METADATA[path.suffix])
    write_atomically(path, content.getvalue())
