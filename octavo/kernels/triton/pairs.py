"""Pairs of a token and one of its experts, in the order that products want. No kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sorted:
    """Pairs of a token and one of its experts, A = T * k of them, in the order of experts."""

    order: Tensor  # i32[A]: which pair, token * k + i, stands at each place
    place: Tensor  # i32[A]: where each pair stands
    weights: Tensor  # f32[A], by place
    ends: Tensor  # i32[E]: the place after each expert's last one
    # i32[3 * W + 1]: expert, first place and last place + 1 of each tile of rows, then how many
    # tiles there are
    tiles: Tensor
    rows: Tensor | None  # [A, H], the tokens' rows by place


def tile_room(pairs: int, experts: int, tile_rows: int) -> int:
    """Most tiles of `tile_rows` rows that so many pairs of so many experts make."""
    return min(pairs, experts) + pairs // tile_rows
