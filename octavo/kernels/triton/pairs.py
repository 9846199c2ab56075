"""Pairs of a token and one of its experts, in the order that products want. No kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sorted:
    """Pairs of a token and one of its experts, A = T * k of them, in the order of experts.

    A token's pairs are those of its `top` experts, which were chosen, and after them those of
    `shared` ones, which stand after all experts that can be chosen.
    """

    order: Tensor  # i32[A]: which pair, token * k + i, stands at each place
    place: Tensor  # i32[A]: where each pair stands
    weights: Tensor  # f32[A], by place; 1 for shared experts
    ends: Tensor  # i32[E + shared]: the place after each expert's last one
    # i32[3 * W + 1]: expert, first place and last place + 1 of each tile of rows, then how many
    # tiles there are
    tiles: Tensor
    # [T * top, H]: the tokens' rows by place, of experts that were chosen; shared ones take x
    rows: Tensor | None
    tokens: int
    count: int  # E
    top: int
    shared: int = 0

    @property
    def pairs_a_token(self) -> int:
        """k."""
        return self.top + self.shared


@dataclass(frozen=True, slots=True)
class Shared:
    """Weights of shared experts: one MLP, as wide as `number` experts side by side."""

    gate_up: Tensor  # [2 * number * I, H]
    down: Tensor  # [H, number * I]
    number: int


def tile_room(pairs: int, experts: int, tile_rows: int) -> int:
    """Most tiles of `tile_rows` rows that so many pairs of so many experts make."""
    return min(pairs, experts) + pairs // tile_rows
