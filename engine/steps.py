"""The shapes of steps that graphs are made for, and the steps that are not methods of `Model`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decoding.model import Model
from decoding.trees.tree import Places, Tree
from utils import Sampling

if TYPE_CHECKING:
    from engine.compiledModel import CompiledModel


# Shapes. `call` asks a model for the step, with inputs of that shape.


@dataclass(frozen=True)
class Prompt:
    """Prefill of a batch of `rows` rows, of any lengths."""

    rows: int

    def call(self, model: CompiledModel) -> None:
        model.read(zeros(model, self.rows, 2), zeros(model, self.rows, 2))


@dataclass(frozen=True)
class Block:
    """The forward of blocks `[rows, width]`."""

    rows: int
    width: int

    def call(self, model: CompiledModel) -> None:
        model.forward(zeros(model, self.rows, self.width), zeros(model, self.rows, self.width))


@dataclass(frozen=True)
class Draw:
    """`count` tokens drawn in sequence after blocks `[rows, read]`."""

    rows: int
    read: int
    count: int

    def call(self, model: CompiledModel) -> None:
        tokens, positions = zeros(model, self.rows, self.read), zeros(model, self.rows, self.read + self.count - 1)
        model.draw(tokens, positions, torch.zeros(self.count, self.rows, device=model.device), Sampling())


@dataclass(frozen=True)
class Nodes:
    """The forward of `count` nodes of a tree, whatever its shape."""

    rows: int
    count: int

    def call(self, model: CompiledModel) -> None:
        model.forward(zeros(model, self.rows, self.count), *places(model, self.rows, self.count))


@dataclass(frozen=True)
class Growth:
    """The growth of `tree` after blocks `[rows, read]`."""

    rows: int
    read: int
    tree: Tree

    def call(self, model: CompiledModel) -> None:
        block, nodes = zeros(model, self.rows, self.read), places(model, self.rows, self.tree.size + 1)[1]
        u = torch.zeros(self.rows, self.tree.draws, device=model.device)
        model.grow(self.tree, block, block.clone(), nodes, u, Sampling())


@dataclass(frozen=True)
class Move:
    """`count` slots of each row that are moved."""

    rows: int
    count: int

    def call(self, model: CompiledModel) -> None:
        model.move(zeros(model, self.rows, self.count), zeros(model, self.rows, self.count))


Shape = Prompt | Block | Draw | Nodes | Growth | Move


def zeros(model: CompiledModel, *shape: int) -> Tensor:
    """Token ids or positions."""
    return torch.zeros(shape, dtype=torch.long, device=model.device)


def places(model: CompiledModel, rows: int, count: int) -> tuple[Tensor, Places]:
    """Positions of `count` nodes, and their places."""
    positions, ancestors = zeros(model, rows, count), torch.ones_like(zeros(model, count))
    return positions, Places(positions, positions.clone(), zeros(model, rows), ancestors)


# Steps that are not methods of `Model`.


def read_block(model: Model, tokens: Tensor, positions: Tensor, nodes: Places | None = None) -> Tensor:
    """`Model.forward` of a block, or of nodes of a tree."""
    return model.forward(tokens, positions, nodes)


def read_chunk(model: Model, tokens: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
    """`Model.forward` of a part of a prompt."""
    return model.forward(tokens, positions, keep=keep)
