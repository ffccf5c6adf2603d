"""Draws docs/tree_mask.png: a small execution as a tree, and the visibility of its packed tokens.

python docs/draw_tree_mask.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gyre_megatron.ops.tree_attention import tree_pieces, visibility
from gyre_megatron.trajectory.packing import PackedBin, pack
from gyre_megatron.trajectory.tree import ExecutionTree, Trajectory, TreeNode

NAMES = (
    "system + task",
    "answer 1",
    "tool result",
    "answer 2",
    "compaction\nrequest",
    "summary",
    "retry of\nanswer 1",
)
NODES = (
    (-1, 6, False),
    (0, 4, True),
    (1, 3, False),
    (2, 4, True),
    (1, 2, False),
    (4, 4, True),
    (0, 4, True),
)
LEAVES = ((3, "main"), (5, "main_summary"), (6, "main"))
COLOURS = ("#4c72b0", "#dd8452", "#55a868")


def example() -> tuple[ExecutionTree, PackedBin]:
    nodes = [
        TreeNode(
            parent=parent,
            token_ids=np.arange(length, dtype=np.int32),
            trainable=np.full(length, sampled),
            behaviour_logprobs=np.zeros(length, np.float32),
            weight_versions=np.zeros(length, np.int32),
            temperatures=np.ones(length, np.float32),
        )
        for parent, length, sampled in NODES
    ]
    owner = np.array([-1, 0, -1, 0, -1, 1, 2], np.int32)
    tree = ExecutionTree(
        "e", "g", 1.0, 1.0, tuple(nodes), tuple(Trajectory(*leaf) for leaf in LEAVES), owner
    )
    return tree, pack([tree], 64, 1)[0]


def draw_tree(axes, tree: ExecutionTree) -> None:
    depth = {-1: 0}
    rows = {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0, 4: 1.0, 5: 1.0, 6: 2.0}
    for i, (parent, length, sampled) in enumerate(NODES):
        start = depth[parent]
        colour = COLOURS[tree.owner[i]] if sampled else "#d0d0d0"
        axes.barh(
            -rows[i],
            length - 0.12,
            left=start,
            height=0.5,
            color=colour,
            edgecolor="black",
            linewidth=0.7,
        )
        axes.text(start + length / 2, -rows[i], NAMES[i], ha="center", va="center", fontsize=7)
        if parent >= 0 and rows[parent] != rows[i]:
            axes.plot(
                [start - 0.06] * 2,
                [-rows[parent] - 0.25, -rows[i] + 0.25],
                color="black",
                linewidth=0.9,
            )
        depth[i] = start + length
    axes.set_xlabel("position = depth on the path")
    axes.set_yticks([])
    axes.set_ylim(-2.6, 0.6)
    axes.set_title(
        "one execution: grey is context, colour is sampled,\none colour per trajectory that trains "
        "it",
        fontsize=9,
    )
    axes.spines[["left", "top", "right"]].set_visible(False)


def draw_mask(axes, bin_: PackedBin) -> None:
    visible = visibility(
        bin_.node_starts, bin_.node_ends, bin_.subtree_ends, bin_.num_tokens
    ).numpy()
    axes.imshow(np.where(visible, 0.85, 1.0), cmap="gray", vmin=0, vmax=1)
    for q, k, queries, keys, causal in tree_pieces(
        bin_.node_starts, bin_.node_ends, bin_.subtree_ends
    ).tolist():
        corner = (k - 0.5, q - 0.5)
        axes.add_patch(
            plt.Rectangle(
                corner,
                keys,
                queries,
                fill=False,
                edgecolor="#c44e52" if causal else "#4c72b0",
                lw=1.6,
            )
        )
    for source, owner in zip(bin_.edge_sources, bin_.edge_trajectories, strict=True):
        axes.add_patch(plt.Rectangle((source - 0.5, source - 0.5), 1, 1, color=COLOURS[owner]))
    ends = bin_.node_ends[:-1] - 0.5
    axes.set_xticks(ends, [])
    axes.set_yticks(ends, [])
    axes.set_xlabel("key token, in depth-first order")
    axes.set_ylabel("query token")
    axes.set_title(
        "visibility: k ≤ q < end of k's subtree\nred: causal squares, blue: rectangles, colour: "
        "loss edges",
        fontsize=9,
    )


def main() -> None:
    tree, bin_ = example()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), width_ratios=(1.25, 1))
    draw_tree(left, tree)
    draw_mask(right, bin_)
    figure.tight_layout()
    figure.savefig(Path(__file__).parent / "tree_mask.png", dpi=130)


if __name__ == "__main__":
    main()
