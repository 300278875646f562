"""A picture of a run: reward of the sampled rounds and accuracy on held-out prompts."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw_learning_curve(
    path: Path, *, rewards: Mapping[int, float], accuracies: Mapping[int, float], title: str
) -> None:
    """Write a PNG.

    Args:
        path: of the file.
        rewards: mean verifier score of each sampled round.
        accuracies: held-out accuracy by rounds of training seen.
        title: above the picture.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(sorted(rewards), [rewards[r] for r in sorted(rewards)], color="tab:gray", label="reward of the rollouts")
    axes.plot(
        sorted(accuracies),
        [accuracies[r] for r in sorted(accuracies)],
        color="tab:blue",
        marker="o",
        markersize=3,
        label="held-out accuracy (sampled)",
    )
    axes.set(xlabel="rounds of training", ylabel="share", ylim=(-0.02, 1.02), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.savefig(path, format="png", dpi=150)
