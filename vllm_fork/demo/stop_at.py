"""A logits processor that ends an answer with a real stop token at a chosen length.

A model with random weights never ends an answer by itself. The server loads the
processor with ``--logits-processors vllm_fork.demo.stop_at:StopAt``, and a request
names its length in its body: ``"vllm_xargs": {"stop_at": 500}``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

ARGUMENT: Final = "stop_at"


class StopAt(AdapterLogitsProcessor):
    """Allows the stop token at output position ``stop_at`` and nowhere else.

    ``stop_at`` counts output tokens, the stop token included. Requests that do not
    name it are left alone.
    """

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool
    ) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        eos = vllm_config.model_config.hf_text_config.eos_token_id
        self._stop_token: int = eos[0] if isinstance(eos, list) else eos

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request whose ``stop_at`` is no length (HTTP 400).

        Raises:
            ValueError: one sentence.
        """
        length = _stop_at(sampling_params)
        if length is not None and (type(length) is not int or length < 1):
            raise ValueError(
                f"vllm_xargs.{ARGUMENT} is {length!r}: expected the number of output "
                "tokens, 1 or more, the stop token included."
            )

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        length = _stop_at(params)
        if length is None:
            return None

        def force_stop(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) + 1 < length:
                logits[self._stop_token] = float("-inf")
                return logits
            only_stop = torch.full_like(logits, float("-inf"))
            only_stop[self._stop_token] = 0.0
            return only_stop

        return force_stop


def _stop_at(params: SamplingParams) -> Any:
    return (params.extra_args or {}).get(ARGUMENT)
