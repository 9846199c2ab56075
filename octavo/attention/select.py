"""Which attention backend serves a model on this device, and why the others do not.

Candidates are tried in order; each that cannot leaves its reason in the notes, which are printed
at start. A backend asked for by name is taken or refused, never replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.attention.base import AttentionBackend, AttentionNeed
from octavo.errors import ConfigError, OctavoError

OPTION = "attention_backend"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend by name; `load` imports and makes it, and may raise ImportError or OctavoError."""

    name: str
    load: Callable[[], AttentionBackend]
    host_only: bool = False  # on any other device it is not even loaded, which may take a compiler
    asked: bool = False  # taken only when it is asked for by name
    latent: bool = False  # it serves multi-head latent attention, and no other kind


def load_native() -> AttentionBackend:
    """The compiled backend of the CPU."""
    from octavo.attention.native import NativeAttention

    return NativeAttention()


def load_triton() -> AttentionBackend:
    """Our own kernels for NVIDIA GPUs."""
    from octavo.attention.triton import TritonAttention

    return TritonAttention()


def load_fa3() -> AttentionBackend:
    """Prefill by an installed FlashAttention-3; decodes by our own kernels."""
    from octavo.attention.fa3 import Fa3Prefill
    from octavo.attention.triton import TritonAttention

    return TritonAttention(Fa3Prefill())


def load_flashinfer() -> AttentionBackend:
    """Prefill by an installed FlashInfer; decodes by our own kernels."""
    from octavo.attention.flashinfer import FlashInferPrefill
    from octavo.attention.triton import TritonAttention

    return TritonAttention(FlashInferPrefill())


def load_sdpa() -> AttentionBackend:
    """The backend in plain torch."""
    from octavo.attention.sdpa import SdpaAttention

    return SdpaAttention()


def load_mla_sdpa() -> AttentionBackend:
    """The backend in plain torch for multi-head latent attention."""
    from octavo.attention.mla_sdpa import LatentSdpaAttention

    return LatentSdpaAttention()


def load_mla_triton() -> AttentionBackend:
    """Our own kernels for multi-head latent attention on NVIDIA GPUs."""
    from octavo.attention.mla_triton import LatentTritonAttention

    return LatentTritonAttention()


CANDIDATES = (
    Candidate("native", load_native, host_only=True),
    Candidate("triton", load_triton),
    Candidate("fa3", load_fa3, asked=True),
    Candidate("flashinfer", load_flashinfer, asked=True),
    Candidate("mla_triton", load_mla_triton, latent=True),
    Candidate("mla_sdpa", load_mla_sdpa, latent=True),
    Candidate("sdpa", load_sdpa),
)


def select(
    need: AttentionNeed, want: str = "auto", candidates: tuple[Candidate, ...] = CANDIDATES
) -> tuple[AttentionBackend, tuple[str, ...]]:
    """(the first backend that can, a line for each decision); `want` "auto" or a name.

    Raises ConfigError if the one that is wanted is unknown or cannot, or if none can.
    """
    known = [candidate.name for candidate in candidates]
    if want not in ("auto", *known):
        raise ConfigError(
            f"attention backend {want!r} is not known; use auto, {', '.join(known)}", OPTION
        )
    refusals: list[str] = []
    for candidate in candidates:
        if want != candidate.name and (want != "auto" or candidate.asked):
            continue
        backend, reason = _try(candidate, need)
        if backend is not None:
            chosen = "as asked" if want != "auto" else "the first that can"
            return backend, (*refusals, f"attention: {candidate.name}, {chosen}")
        refusals.append(f"attention: not {candidate.name}: {reason}")
    raise ConfigError("; ".join(refusals) + "; use --attention-backend auto", OPTION)


def _try(candidate: Candidate, need: AttentionNeed) -> tuple[AttentionBackend | None, str]:
    """(backend, "") or (None, why not)."""
    if candidate.host_only and need.device != "cpu":
        return None, f"it runs on the CPU, not on {need.device}"
    if candidate.latent and not need.latent:
        return None, "it serves models with multi-head latent attention alone"
    if need.latent and not candidate.latent:
        return None, "it has no multi-head latent attention (MLA), which this model needs"
    try:
        backend = candidate.load()
    except (ImportError, OctavoError) as error:
        return None, str(error)
    reason = backend.supports(need)
    return (None, reason) if reason else (backend, "")
