"""Figures of two next-token distributions over a text: Kullback-Leibler divergence, likelihoods, equal top tokens.

Legend: B sequences, T tokens, V vocabulary size.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hqconv.errors import RequestError

_NUM_VALUES = 1 << 22  # logits at a time: 32 MiB of float64, and a few times as much
PERCENTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


class Divergence:
    """Figures of each predicted token: every token of a text but the first of its sequence."""

    def __init__(self) -> None:
        self._kl: list[torch.Tensor] = []
        self._nll: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._num_equal = 0

    def add(self, logits: torch.Tensor, others: torch.Tensor, ids: torch.Tensor) -> None:
        """Add the predictions of some sequences: logits of source and artifact [B, T, V] for token ids [B, T].

        Computed in float64, on the logits' device. Raises RequestError for logits that are not finite.
        """
        for name, one in (("source", logits), ("artifact", others)):
            if not bool(torch.isfinite(one).all()):
                raise RequestError(
                    "The predictions are not finite numbers.",
                    where=f"logits of the {name}",
                    found="NaN or infinity",
                    remedy="Compute in float32; if it stays so, transformers runs this model in a way that cannot be "
                    "evaluated layer by layer.",
                )
        labels = ids[:, 1:].flatten().to(logits.device)
        first, second = (one[:, :-1].flatten(0, 1) for one in (logits, others))
        rows = max(1, _NUM_VALUES // logits.size(-1))
        for begin in range(0, len(labels), rows):
            cut = slice(begin, begin + rows)
            p, q = (one[cut].double().log_softmax(-1) for one in (first, second))
            self._kl.append((p.exp() * (p - q)).sum(-1).clamp(min=0).cpu())
            for log_probabilities, nll in zip((p, q), self._nll, strict=True):
                nll.append(-log_probabilities.gather(-1, labels[cut, None])[:, 0].cpu())
            self._num_equal += int((p.argmax(-1) == q.argmax(-1)).sum())

    def figures(self) -> dict[str, Any]:
        """Return the figures of all predictions as a document; natural logarithms (nats)."""
        kl = torch.cat(self._kl)
        nll = {name: float(torch.cat(one).mean()) for name, one in zip(("source", "artifact"), self._nll, strict=True)}
        count = len(kl)
        error = float(kl.std(correction=1)) / math.sqrt(count) if count > 1 else None
        percentiles = {name: float(kl.quantile(share)) for name, share in PERCENTILES.items()}
        return {
            "num_predictions": count,
            "kl": {"mean": float(kl.mean()), "standard_error": error, **percentiles, "max": float(kl.max())},
            "perplexity": {name: math.exp(min(mean, 700.0)) for name, mean in nll.items()},  # of finite float64
            "mean_nll": nll,
            "top1_agreement": self._num_equal / count,
        }
