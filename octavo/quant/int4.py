"""Checkpoints with weights of 4 bits: AutoAWQ's, GPTQ's and compressed-tensors' layouts.

All become a `Grouped` once, at load, with their columns in order of groups. What differs is which
dimension is packed into words, how zero points are stored, and whether columns are in an order of
their own (GPTQ's act-order). Next file: `fp8.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.formats import Grouped
from octavo.kernels.ops import Ops, PackedWeight
from octavo.quant.scheme import Scheme
from octavo.quant.words import PER_WORD, unpack, unpack_awq
from octavo.weights.spec import ParamSpec, Part

DUMMY_SCALE = 0.004  # makes noise of 4 bits as large as that of plain weights
MIDDLE = 8.0  # the code that means 0 where no zero points are stored


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's share of a weight, in the units that its tensors are packed in."""

    columns: int
    start: int
    full: int
    groups: int
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """Of this rank."""
        return sum(part.size for part in self.parts)


class Int4:
    """A QuantMethod; its subject is one of three layouts, told apart by the scheme's form."""

    __slots__ = ("_dtype", "_ops", "_scheme", "name")

    by_rows = False

    def __init__(self, scheme: Scheme, ops: Ops, dtype: torch.dtype) -> None:
        self.name: str = scheme.form
        self._scheme = scheme
        self._ops = ops
        self._dtype = dtype

    def params(
        self, in_features: int, parts: tuple[Part, ...], in_start: int, in_full: int
    ) -> dict[str, ParamSpec]:
        """The form's tensors, cut to this rank. Raises ConfigError where a cut breaks a group."""
        group = self._scheme.group or in_full
        whole_rows = self._scheme.act_order  # then any column may be of any group
        for name, value in (("in_features", in_features), ("first column", in_start)):
            if value % group and not whole_rows:
                raise ConfigError(
                    f"{self._scheme.form} weights have groups of {group} columns, which do not "
                    f"divide {name} {value} (of {in_full}); use another tensor_parallel_size or a "
                    "checkpoint with smaller groups",
                    "quantization",
                )
        for name, value in (("columns", in_features), ("first column", in_start)):
            if value % PER_WORD:
                raise ConfigError(
                    f"{self._scheme.form} weights hold {PER_WORD} columns in a word, which does "
                    f"not divide {name} {value}; use another tensor_parallel_size",
                    "quantization",
                )
        groups = -(-in_full // group) if whole_rows else in_features // group
        cut = Cut(in_features, in_start, in_full, groups, parts)
        make = {"awq": self._awq, "gptq": self._gptq}.get(self.name, self._compressed)
        return make(cut, group)

    def _awq(self, cut: Cut, group: int) -> dict[str, ParamSpec]:
        """Qweight [K, N / 8], qzeros [K / g, N / 8], scales [K / g, N]."""
        words = tuple(part.in_units(PER_WORD, "words of awq weights") for part in cut.parts)
        return {
            "qweight": self._laid_out(cut, words, 1, kept=self._kept(cut), turned=True),
            "qzeros": self._laid_out(cut, words, group, turned=True),
            "scales": self._laid_out(cut, cut.parts, group, dummy=DUMMY_SCALE, turned=True),
        }

    def _gptq(self, cut: Cut, group: int) -> dict[str, ParamSpec]:
        """As AutoAWQ's, but qweight [K / 8, N]; and g_idx [K], the group of each column."""
        words = tuple(part.in_units(PER_WORD, "words of gptq weights") for part in cut.parts)
        return {
            "qweight": self._laid_out(cut, cut.parts, PER_WORD, kept=self._kept(cut), turned=True),
            "qzeros": self._laid_out(cut, words, group, turned=True),
            "scales": self._laid_out(cut, cut.parts, group, dummy=DUMMY_SCALE, turned=True),
            "g_idx": self._table(cut),
        }

    def _compressed(self, cut: Cut, group: int) -> dict[str, ParamSpec]:
        """weight_packed [N, K / 8], weight_scale [N, K / g], zero points [N / 8, K / g]."""
        specs = {
            "weight_packed": self._laid_out(cut, cut.parts, PER_WORD, kept=self._kept(cut)),
            "weight_scale": self._laid_out(cut, cut.parts, group, dummy=DUMMY_SCALE),
        }
        if not self._scheme.symmetric:
            words = tuple(part.in_units(PER_WORD, "words of zero points") for part in cut.parts)
            specs["weight_zero_point"] = self._laid_out(cut, words, group)
        if self._scheme.act_order:
            specs["weight_g_idx"] = self._table(cut)
        return specs

    def _laid_out(
        self,
        cut: Cut,
        parts: tuple[Part, ...],
        unit: int,
        *,
        turned: bool = False,
        dummy: float | None = None,
        kept: int | None = None,
    ) -> ParamSpec:
        """[rows, K / unit]; if `turned` [K / unit, rows], where columns lie along the first."""
        columns, start, full = self._columns(cut, unit)
        rows = sum(part.size for part in parts)
        dtype = torch.int32 if dummy is None else torch.float32
        shape, out_dim, in_dim = (rows, columns), 0, 1
        if turned:
            shape, out_dim, in_dim = (columns, rows), 1, 0
        return ParamSpec(
            shape, dtype, parts, out_dim, in_dim, start, full, dummy=dummy, kept_bytes=kept
        )

    @staticmethod
    def _table(cut: Cut) -> ParamSpec:
        """The group of each column. A vector of columns: what are rows of others are columns."""
        every = tuple(Part(part.name, cut.columns, cut.full, cut.start) for part in cut.parts)
        return ParamSpec((cut.columns * len(every),), torch.int32, every, out_dim=0)

    def _columns(self, cut: Cut, unit: int) -> tuple[int, int, int]:
        """(count, start, full) of a dimension in which `unit` columns are one."""
        grouped = unit == (self._scheme.group or cut.full)
        if grouped and self._scheme.act_order:
            return cut.groups, 0, cut.groups
        return cut.columns // unit, cut.start // unit, cut.full // unit

    def _kept(self, cut: Cut) -> int:
        count = cut.rows * cut.columns
        return count * 5 // 8 if self._ops.pack_grouped else count * self._dtype.itemsize

    def finish(self, params: dict[str, Tensor]) -> PackedWeight:
        """Unpacks the words and hands a `Grouped` to the kernels, or plain weights."""
        if self.name == "awq":
            weight = self._grouped(
                unpack_awq(params.pop("qweight")).t(),
                params.pop("scales").t(),
                unpack_awq(params.pop("qzeros")).t().float(),
                None,
            )
        elif self.name == "gptq":
            codes = unpack(params.pop("qweight").t())
            zeros = unpack(params.pop("qzeros")).t().float()
            table = params.pop("g_idx")
            zeros = zeros + 1 if self._scheme.zero_less_one else zeros
            # Groups in order need no table; a file may still have one.
            order = table if self._scheme.act_order else None
            weight = self._grouped(codes, params.pop("scales").t(), zeros, order)
        else:
            weight = self._of_compressed(params)
        if isinstance(weight, Tensor):
            return self._ops.pack(weight)
        if self._ops.pack_grouped is None:
            return self._ops.pack(weight.plain(self._dtype))
        return self._ops.pack_grouped(weight)

    def _of_compressed(self, params: dict[str, Tensor]) -> Grouped | Tensor:
        codes = unpack(params.pop("weight_packed"))
        scale = params.pop("weight_scale")
        zero = torch.full_like(scale, MIDDLE)
        if "weight_zero_point" in params:
            zero = unpack(params.pop("weight_zero_point").t()).t().float()[: len(scale)]
        return self._grouped(codes, scale, zero, params.pop("weight_g_idx", None))

    def _grouped(
        self, codes: Tensor, scale: Tensor, zero: Tensor, table: Tensor | None
    ) -> Grouped | Tensor:
        """The weight with its columns in the order of groups.

        A plain weight where this rank's columns do not fill their groups alike.
        """
        columns = codes.shape[1]
        group = columns // scale.shape[1] if table is None else self._scheme.group
        if table is None:
            return Grouped(codes.contiguous(), scale.contiguous(), zero.contiguous(), group)
        tables = table.view(-1, columns).long()
        if not bool((tables == tables[0]).all()):
            raise ConfigError(
                "tensors that are multiplied together have columns in groups of different order "
                "(g_idx); use a checkpoint whose layers were quantized with the same inputs",
                "quantization",
            )
        one = tables[0]
        counts = torch.bincount(one, minlength=scale.shape[1])
        if bool((counts == group).all()):
            order = one.argsort(stable=True)
            return Grouped(
                codes.index_select(1, order), scale.contiguous(), zero.contiguous(), group, order
            )
        values = (codes.float() - zero.index_select(1, one)) * scale.index_select(1, one)
        return values.to(self._dtype)

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]."""
        return self._ops.linear(x, weight, bias, None)
