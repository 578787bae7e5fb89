"""`Tree`: the shape of a tree of guesses; `Places`: where its nodes are; `siblings`: the guesses of one level.

A chain ends at its first rejection; a tree has a second candidate there (SpecInfer, Miao et al., arXiv 2305.09781).

    0 ─┬─ 1 ─┬─ 4        Node 0 is the last committed token. Nodes 1, ..., n are guesses, numbered level by level;
       │     └─ 5        siblings are next to each other, in the order they are drawn.
       ├─ 2 ─── 6
       └─ 3              `Tree.of("3/2,1,0")`, `parents = (0, 0, 0, 1, 1, 2)`
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from utils import UserError, pick, upload

if TYPE_CHECKING:
    from decoding.rows import Rows

MOST = 62  # guesses; with the root, a node's ancestors must fit into the bits of an int64


@dataclass(frozen=True)
class Tree:
    """The shape of a tree with nodes 0 (the root) to n. parents: the parents of nodes 1, ..., n, in ascending order.

    A chain may have any number of guesses; none is plain decoding. A tree with branches has at most MOST.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.is_chain or len(self.parents) <= MOST, "the ancestors of a node are bits of an int64"
        assert list(self.parents) == sorted(self.parents), "nodes are numbered level by level"
        assert all(0 <= parent <= i for i, parent in enumerate(self.parents)), "a parent comes before its children"

    @classmethod
    def chain(cls, length: int) -> Tree:
        """Each node but the last has one child: ordinary speculative decoding with gamma = `length`."""
        return cls(tuple(range(length)))

    @classmethod
    def of(cls, text: str) -> Tree:
        """The tree of a text such as "3,2,1,1" or "3/2,1,0".

        "3,2,1,1": the root has 3 children, each of these has 2, and so on (SpecInfer's expansion configuration).
        "3/2,1,0": the same level by level, with one number for each node of the level, or one for all. `str` writes
        the shorter form.
        Raises UserError if the text is not such a list.
        """
        form = re.fullmatch(r"[0-9]{1,3}([,/][0-9]{1,3})*", text)
        levels = [level.split(",") for level in text.split("/")] if "/" in text else [[n] for n in text.split(",")]
        parents: list[int] = []
        nodes: Sequence[int] = [0]
        for level in levels if form else ():
            counts = [int(n) for n in level] * (len(nodes) if len(level) == 1 else 1)
            if len(counts) != len(nodes) or not sum(counts) or len(parents) + sum(counts) > MOST:
                form = None
                break
            first = len(parents) + 1
            parents += [node for node, count in zip(nodes, counts) for _ in range(count)]
            nodes = range(first, len(parents) + 1)
        if not form:
            raise UserError(
                f"{text!r} is not a tree of 1 to {MOST} guesses; write the number of children of each node, depth by "
                "depth (3,2,1,1), or of every single node, level by level (3/2,1,0)"
            )
        return cls(tuple(parents))

    def __str__(self) -> str:
        counts = [[len(self.children[node]) for node in level] for level in self.levels[:-1]]
        if all(len(set(level)) == 1 for level in counts):
            return ",".join(str(level[0]) for level in counts)
        return "/".join(",".join(map(str, level)) for level in counts)

    @property
    def size(self) -> int:
        """n, the number of guesses."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of nodes 0, ..., n; the root's is 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """The most guesses that one round can accept."""
        return self.depths[-1]

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of nodes 0, ..., n, in the order they are drawn."""
        children: list[list[int]] = [[] for _ in range(self.size + 1)]
        for node, parent in enumerate(self.parents, 1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each depth, from the root's level."""
        groups = itertools.groupby(range(self.size + 1), self.depths.__getitem__)
        return tuple(tuple(nodes) for _, nodes in groups)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """How many siblings were drawn before nodes 1, ..., n."""
        return tuple(self.children[parent].index(node) for node, parent in enumerate(self.parents, 1))

    def path(self, node: int) -> list[int]:
        """The nodes from depth 1 down to `node`; none for the root."""
        nodes: list[int] = []
        while node:
            nodes.insert(0, node)
            node = self.parents[node - 1]
        return nodes

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For nodes 0, ..., n: a bit mask of the nodes that the node attends to, itself and its ancestors."""
        masks = [1]
        for node, parent in enumerate(self.parents, 1):
            masks.append(masks[parent] | 1 << node)
        return tuple(masks)

    @property
    def draws(self) -> int:
        """Uniform numbers that `Model.grow` needs: in each level, the most children of its nodes for
        each node that has children."""
        counts = [[len(self.children[node]) for node in level if self.children[node]] for level in self.levels[:-1]]
        return sum(len(level) * max(level) for level in counts)

    def expected_tokens(self, acceptance: Sequence[Sequence[float]]) -> float:
        """Expected tokens of a round with this tree, the target's own included: 1 + the sum over all nodes of the
        probability that the node is accepted, which is a product along its path.

        `acceptance[d][k]` is the probability that the k-th sibling (from 0) at depth d + 1 is the one that is accepted,
        if its parent was. (Sequoia's positional acceptance assumption, arXiv 2402.12374, section 3.1, here for each
        depth.)
        """
        reached = [1.0]
        for parent, rank in zip(self.parents, self.ranks):
            reached.append(reached[parent] * acceptance[self.depths[parent]][rank])
        return sum(reached)

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self.parents == tuple(range(self.size))


class Places(NamedTuple):
    """Where m nodes of a tree are.

    Node i has a slot of its own in the KV caches, that of the root plus i, and the position of its depth. A node
    attends to the committed tokens, its ancestors and itself.

    positions, slots: int64 `[B, m]`. root: int64 `[B]`, the slot of the tree's root. ancestors: int64 `[m]`, bit masks
    of the nodes each one attends to, see `Tree.ancestors`.
    """

    positions: Tensor
    slots: Tensor
    root: Tensor
    ancestors: Tensor

    @classmethod
    def of(cls, rows: Rows, tree: Tree) -> Places:
        """All nodes of `tree`, the root first. Positions are clamped as in `Rows.positions`; slots need
        `Rows.spare`."""
        places = cls.at(rows.lengths - 1, tree)
        return places._replace(positions=places.positions.clamp_(max=rows.capacity - 1))

    @classmethod
    def at(cls, root: Tensor, tree: Tree) -> Places:
        """All nodes of `tree`, the root first, which is at the positions `root`, int64 `[B]`."""
        depths, order, ancestors = numbers(tree, root.device)
        return cls(root[:, None] + depths, root[:, None] + order, root, ancestors)

    @property
    def parents(self) -> Tensor:
        """The slot of each node's parent, int64 `[B, m]`; for the root, the slot before its own."""
        number = torch.arange(MOST + 1, device=self.root.device)
        attended = self.ancestors[:, None] >> number & 1  # [m, MOST + 1]; the last one is the node itself
        node = (attended * number).amax(1, keepdim=True)
        return self.root[:, None] - 1 + (attended * (number < node) * (number + 1)).amax(1)

    def only(self, nodes: Sequence[int]) -> Places:
        return Places(
            columns(self.positions, nodes), columns(self.slots, nodes), self.root, columns(self.ancestors, nodes)
        )

    def to(self, device: torch.device) -> Places:
        return Places(*(x.to(device) for x in self))

    def mask(self, reach: int) -> Tensor:
        """Which of the first `reach` slots each node attends to: bool `[B, m, reach]`."""
        after = torch.arange(reach, device=self.root.device) - self.root[:, None]  # [B, reach]; the root's slot is 0
        is_ancestor = (self.ancestors[:, None] >> after.clamp(0, MOST)[:, None]) & 1 > 0
        return (after <= 0)[:, None] | (is_ancestor & (after <= MOST)[:, None])

    def key_positions(self, reach: int) -> Tensor:
        """The positions in the text of the first `reach` slots, for each node: int64 `[B, m, reach]`. An ancestor's is
        the root's plus its depth, the number of its own ancestors."""
        slots = torch.arange(reach, device=self.root.device)
        after = (slots - self.root[:, None]).clamp(0, MOST)
        above = self.ancestors[:, None] >> torch.arange(MOST + 1, device=self.root.device) & 1
        depths = (above.cumsum(1) - above)[:, after].movedim(0, 1)
        return torch.where(slots <= self.root[:, None, None], slots, self.root[:, None, None] + depths)


@functools.lru_cache(maxsize=256)
def numbers(tree: Tree, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Depths, numbers and ancestors of the nodes 0, ..., n: int64 `[n + 1]` each."""
    depths, order, ancestors = upload([tree.depths, range(tree.size + 1), tree.ancestors], device)
    return depths, order, ancestors


def depths_of(tree: Tree, device: torch.device) -> Tensor:
    """The depths of nodes 1, ..., n: int64 `[n]`."""
    return numbers(tree, device)[0][1:]


def columns(x: Tensor, nodes: Sequence[int]) -> Tensor:
    """`x[..., nodes]`, without an index that a GPU would wait for."""
    if list(nodes) == list(range(nodes[0], nodes[-1] + 1)):
        return x[..., nodes[0] : nodes[-1] + 1]
    return torch.stack([x[..., node] for node in nodes], -1)


def seen_after_nodes(seen: Tensor | None, drafts: Tensor, tree: Tree, nodes: Sequence[int]) -> Tensor | None:
    """The tokens in the text that ends with each of some nodes: bool `[B, m, V]`. seen: see `Rows.seen`; None stays
    None."""
    if seen is None:
        return None
    paths = [[node - 1 for node in tree.path(end)] for end in nodes]
    return torch.stack([seen.scatter(1, columns(drafts, path), True) if path else seen for path in paths], 1)


def siblings(q: Tensor, u: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Draw `counts[i]` children for node i of a level. No token is drawn twice for a node.

    q: float32 `[B, m, V]`, the draft's distribution after each of the m nodes.
    u: float32 `[B, m, K]`, uniform on [0, 1), K >= max(counts). The k-th child of a node is drawn with its `u[..., k]`.
    Returns the tokens, int64 `[B, sum(counts)]`, and the laws that each was really drawn from, float32
    `[B, sum(counts), V]`: the children of node 0 in the order they are drawn, then those of node 1, and so on. The law
    of a first child is q; that of a later one is q without the children before it, renormalised. If fewer tokens are
    left than children, the missing children have the law 0 and the token of the first child. If q is nan, so
    are the laws, and the tokens are V, as those of `utils.pick` are.

    It must not synchronise with the host: an engine may record its work and repeat it.
    """
    drawn: list[list[tuple[Tensor, Tensor]]] = [[] for _ in counts]
    going = list(range(len(counts)))
    left = q
    for k in range(max(counts)):
        parents = [i for i, node in enumerate(going) if counts[node] > k]
        if len(parents) < len(going):
            left, going = torch.stack([left[:, i] for i in parents], 1), [going[i] for i in parents]
        total = left.sum(-1, keepdim=True)
        law = left if k == 0 else left / total.masked_fill(total == 0, 1)
        tokens = pick(law, torch.stack([u[:, node, k] for node in going], 1))
        if k > 0:
            first = torch.stack([drawn[node][0][0] for node in going], 1)
            tokens = torch.where(total[..., 0] == 0, first, tokens)
        for i, node in enumerate(going):
            drawn[node].append((tokens[:, i], law[:, i]))
        left = law.scatter(-1, tokens.clamp(max=q.shape[-1] - 1)[..., None], 0)  # V, drawn from nan, is no index.
    pairs = [pair for node in drawn for pair in node]
    return torch.stack([token for token, _ in pairs], 1), torch.stack([law for _, law in pairs], 1)
