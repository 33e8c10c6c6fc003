"""What a ranking looks like: its percentiles, what is easy and hard in it, a histogram."""

from collections.abc import Callable
from pathlib import Path

from support.figures import plotted
from support.ranking import Ranking

PERCENTS = (0, 1, 5, 25, 50, 75, 95, 99, 100)
PLOTTED = 1 << 18  # values of a histogram at most


def show_percentiles(rankings: dict[str, Ranking]) -> None:
    print("percentile    " + "".join(f"{percent:>12}" for percent in PERCENTS))
    for name, ranking in rankings.items():
        counts = [max(ranking.at_percent(percent), 1) for percent in PERCENTS]
        print(f"{name:14}" + "".join(f"{ranking.highest(count):12.6g}" for count in counts))


def show_examples(rankings: dict[str, Ranking], text_of: Callable[[int], str]) -> None:
    """The median sample of the easiest and of the hardest percent, in each ranking."""
    for name, ranking in rankings.items():
        for which, share in (("easiest", 0.005), ("hardest", 0.995)):
            sample = int(ranking.order[int(share * len(ranking))])
            text = " ".join(text_of(sample).split())
            print(f"\n{which} percent by {name}, {ranking.values[sample]:g}:\n{text[:400]}")


def plot_histograms(rankings: dict[str, Ranking], file: str) -> None:
    """A figure of the values of each ranking; with several, its name goes into the file's."""
    for name, ranking in rankings.items():
        values = ranking.values[:: -(-len(ranking) // PLOTTED)]
        path = Path(file)
        if len(rankings) > 1:
            path = path.with_stem(f"{path.stem}-{name}")
        plotted(str(path), lambda axes, v=values: axes.hist(v, 60), xlabel=name, ylabel="samples")
