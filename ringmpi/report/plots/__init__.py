"""Pictures of result files, as PNG, SVG or PDF. The only room that imports matplotlib."""

import matplotlib as mpl

mpl.use("Agg")  # Files only: a batch job has no screen.
mpl.rcParams.update(
    {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.edgecolor": "#8a9099",
        "axes.labelcolor": "#3b4048",
        "xtick.color": "#3b4048",
        "ytick.color": "#3b4048",
        "svg.fonttype": "none",  # Texts stay texts, which can be searched.
        "savefig.dpi": 150,
    }
)
